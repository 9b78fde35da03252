"""The model as a workflow sees it: chat in, `ModelOutput` out, every call recorded with its exact token ids.

In a conversation the next prompt is the ids so far plus the rendered new messages: what was sampled is never
tokenised again. A history that was changed (compaction, stripped thinking) starts a new row and is counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from headrace.data.episode import FinishReason, ModelOutput, OwnedMessages, Step, Trajectory
from headrace.data.seeds import derive_seed
from headrace.data.task import Message
from headrace.engines.base import Generates, Generation, SamplingParams
from headrace.errors import EngineError, HeadraceError, PromptTooLongError, WorkflowError
from headrace.ledger.episode_record import AttemptRecord, DivergedReplay, call_digest, tool_digest
from headrace.rollout.budget import Budget, Spending
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.messages import ToolSchema
from headrace.rollout.store import Store, Values, ValuesInMemory
from headrace.utils.threads import call_sync_or_async

T = TypeVar("T")
Answered = dict[int, tuple[ModelOutput, Step] | None]
CutProblem = Callable[[str], tuple[str, str] | None]
"""Why replies of a role must not be cut by top_p or top_k, and what to do about it; None where they may."""


def no_cut_problem(role: str) -> None:
    """Nothing is trained on the replies."""


class Model:
    """Handed to a workflow for one episode. Not shared between episodes.

    `training` is False where the episode is only evaluated.
    """

    def __init__(
        self,
        engine: Generates,
        chat: ChatTemplate,
        sampling: SamplingParams,
        seed: int,
        training: bool = True,
        record: AttemptRecord | None = None,
        budget: Budget | None = None,
        values: Values | None = None,
        cut_problem: CutProblem = no_cut_problem,
    ) -> None:
        self._engine = engine
        self.template = chat
        self.sampling = sampling
        """The run's own settings, which a call may go over."""
        self._seed = seed
        self._record = record or AttemptRecord()
        self.store = Store(values or ValuesInMemory(), self.recorded)
        """What episodes remember for each other."""
        self.spending = Spending(budget or Budget())
        """What the episode has used of its budget."""
        self._calls = self._results = 0
        # by role and number, in the order in which the calls began; None until the answer is there
        self._answered: dict[str, Answered] = {}
        self.diverged_prefixes = 0
        self.failure: EngineError | None = None
        """What the engine failed with; it ends the run, whatever the workflow makes of it."""
        self.give_up: Callable[[], None] = lambda: None
        """Called when the workflow does not do again what is recorded: to cancel it, whatever it makes of that."""
        self.training = training
        self._cut_problem = cut_problem
        self._ended = False

    def end(self) -> None:
        """The episode is over: what is asked from now on is neither answered nor recorded."""
        self._ended = True

    async def chat(
        self, messages: Sequence[Message], role: str = "agent", tools: Sequence[ToolSchema] = (), **sampling: Any
    ) -> ModelOutput:
        """Sample a reply to the conversation. `role` names the trajectory that the call belongs to.

        `tools` are what the model may call, as OpenAI's function schemas; the reply's `tool_calls` are what it calls.
        Keyword arguments (`temperature`, `top_p`, `top_k`, `max_tokens`, `stop`, …) go over the run's own settings.
        """
        history = OwnedMessages.copy_of(messages)  # at once: the workflow may change its list while the model answers
        answered = self._answered.setdefault(role, {})
        prompt_ids = self._prompt_ids(answered, history, tools)
        return await self._call(prompt_ids, role, history, tools, sampling)

    async def complete(self, prompt: str | Sequence[int], role: str = "agent", **sampling: Any) -> ModelOutput:
        """Go on from plain text or ids, without a chat template; recorded like any other call.

        A text that begins with an earlier one of the role and its reply keeps their exact ids.
        """
        shown = prompt if isinstance(prompt, str) else list(prompt)
        # a role that no message has, so that no conversation is ever taken to continue from here
        history = OwnedMessages(({"role": "prompt", "content": shown},))
        answered = self._answered.setdefault(role, {})
        prompt_ids = self._ids_of_text(answered, prompt) if isinstance(prompt, str) else tuple(prompt)
        return await self._call(prompt_ids, role, history, (), sampling)

    async def _call(
        self, prompt_ids: tuple[int, ...], role: str, history: OwnedMessages, tools: Sequence[ToolSchema],
        sampling: dict[str, Any],
    ) -> ModelOutput:  # fmt: skip
        await self._halt_if_over()
        if isinstance(sampling.get("stop"), str):
            sampling["stop"] = (sampling["stop"],)
        if sampling:
            self._refuse_cut(sampling, role)
        params = self.spending.take_turn(replace(self.sampling, **sampling) if sampling else self.sampling)
        answered = self._answered[role]
        call, self._calls = self._calls, self._calls + 1
        answered[call] = None  # its place: of calls side by side, a late answer stands where it was asked for
        try:
            output = await self._answer(prompt_ids, params, call, role, history, tools)
        except BaseException:
            del answered[call]  # the conversation continues from the answer before
            raise
        finally:
            self.spending.end_turn(params)
        self.spending.sampled(output, params)
        answered[call] = (output, Step.from_model_output(output, history))
        return output

    def _refuse_cut(self, sampling: dict[str, Any], role: str) -> None:
        """`top_p` and `top_k` of this call; the rules at start-up have looked at the run's own."""
        cut = {"top_p": (sampling.get("top_p") or 1.0) < 1.0, "top_k": bool(sampling.get("top_k"))}
        given = ", ".join(f"{name}={sampling[name]}" for name, cuts in cut.items() if cuts)
        if given and (problem := self._cut_problem(role)):
            raise WorkflowError(f"a call with {given} {problem[0]}; leave it out where model.training, or {problem[1]}")

    async def tool(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a tool, plain (in a thread) or async. After a crash its recorded answer is handed back instead.

        What it returns must be data that JSON can hold: that is what the record keeps, and what is returned.
        """
        self.spending.take_tool_call()
        name = getattr(function, "__name__", type(function).__name__)

        async def call() -> Any:
            return await call_sync_or_async(function, *arguments, **named)

        return await self.recorded("tool", name, [arguments, named], call)

    async def recorded(self, kind: str, name: str, request: Any, call: Callable[[], Awaitable[Any]]) -> Any:
        """The recorded answer to a request, or a live one, which is recorded."""
        number, self._results = self._results, self._results + 1
        digest = tool_digest(name, request) if self._record.keeps else ""
        known = await self._recalled(lambda: self._record.recall_result(number, digest))
        if known is not None:
            await asyncio.sleep(0)  # as a live call would: others may run
            return known[0]
        answer = await call()
        await self._halt_if_over()
        try:
            payload = json.loads(json.dumps(answer))
        except (TypeError, ValueError) as error:
            raise WorkflowError(f'{kind} "{name}" must answer with data that JSON can hold: {error}') from error
        self._record.resulted(number, kind, name, digest, payload)
        return payload

    async def _answer(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, call: int, role: str, history: OwnedMessages,
        tools: Sequence[ToolSchema],
    ) -> ModelOutput:  # fmt: skip
        """What was recorded for this call, or what the engine samples now."""
        seed = derive_seed(self._seed, call)
        digest = call_digest(prompt_ids, params, seed, role) if self._record.keeps else ""
        known = await self._recalled(lambda: self._record.recall_call(call, digest))
        if known is not None:
            await asyncio.sleep(0)  # as a live call would: others may run
            return known
        generation = await self._generate(prompt_ids, params, seed)
        await self._halt_if_over()
        output = self.template.parse(generation, params.stop or (), call, tools)
        self._record.called(output, role, seed, digest, history)
        return output

    async def _recalled(self, recall: Callable[[], T]) -> T:
        """What was recorded. A workflow that has left its record gets no answers until it is cancelled."""
        await self._halt_if_over()
        try:
            return recall()
        except DivergedReplay:
            self.give_up()
            raise

    async def _halt_if_over(self) -> None:
        """Wait for ever if nobody wants the answer: an exception could be caught, and the call be made again."""
        if self._ended or self._record.diverged:
            await asyncio.get_running_loop().create_future()

    async def _generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, seed: int) -> Generation:
        """What the engine samples. Its failure is kept, so that no workflow can hide it."""
        try:
            return await self._engine.generate(prompt_ids, params, seed)
        except PromptTooLongError:
            raise
        except EngineError as error:
            self.failure = error
            raise
        except HeadraceError:  # a request that no engine could answer: it is the workflow's
            raise
        except Exception as error:
            self.failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            raise self.failure from error

    def trajectories(self, reward: float | None = None) -> list[Trajectory]:
        """One trajectory per role, of the calls answered so far, in the order in which they were made."""
        steps = {role: tuple(pair[1] for pair in calls.values() if pair) for role, calls in self._answered.items()}
        return [Trajectory(made, role, reward) for role, made in steps.items() if made]

    def returned_tokens(self) -> int:
        """How many sampled tokens the answers so far carry."""
        pairs = (pair for calls in self._answered.values() for pair in calls.values())
        return sum(len(pair[1].response_ids) for pair in pairs if pair)

    def demonstrate(self, messages: Sequence[Message]) -> list[Step]:
        """Steps whose responses are the assistant turns of a given conversation: nothing is sampled."""
        return self.template.demonstration(messages)

    def _prompt_ids(self, answered: Answered, messages: OwnedMessages, tools: Sequence[ToolSchema]) -> tuple[int, ...]:
        """The ids of the longest conversation so far that the messages extend, and those of the new messages."""
        earlier = [pair for pair in reversed(answered.values()) if pair is not None]
        for output, step in sorted(earlier, key=lambda pair: -len(pair[1].messages)):
            extended = self.template.extend(step.messages, output, messages, tools)
            if extended is not None:
                return extended
        self.diverged_prefixes += bool(answered)
        return self.template.render(messages, tools)

    def _ids_of_text(self, answered: Answered, prompt: str) -> tuple[int, ...]:
        best, kept = "", None
        for output, step in (pair for pair in answered.values() if pair is not None):
            before = step.messages[0]["content"] if step.messages[0]["role"] == "prompt" else None
            so_far = before + output.text if isinstance(before, str) else None
            if so_far is not None and prompt.startswith(so_far) and len(so_far) > len(best):
                best, kept = so_far, (*output.prompt_ids, *output.completion_ids)
        return (*(kept or ()), *self.template.encode(prompt[len(best) :]))


def hit_limit(output: ModelOutput) -> bool:
    """Whether the reply was cut by a token limit."""
    return output.finish_reason in (FinishReason.LENGTH, FinishReason.MODEL_LENGTH)
