"""One recorded episode again: its workflow and judger run now, the model and the tools answer as they did.

A test case that `headrace view` writes calls `replay_episode`. Nothing is sampled, so no model is needed. A workflow
that asks for something else than the record says raises a DivergedReplay, which names the call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from headrace.config.loading import build_config
from headrace.data.episode import Episode, ModelOutput, OwnedMessages, Step
from headrace.data.task import Message, Task
from headrace.data.training import load_training
from headrace.errors import DataError
from headrace.judge.router import configured_judger
from headrace.ledger.episode_record import AttemptRecord, DivergedReplay
from headrace.rollout.agent_loop import AgentLoop, Limits, close_all, sampling_of
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.messages import ToolSchema
from headrace.rollout.model_client import Model
from headrace.rollout.outcome import RolloutSpec
from headrace.rollout.remote_model import NoEngine
from headrace.rollout.workflow import run_function
from headrace.run.journal import RunJournal

Recorded = Mapping[str, Any]


def replay_episode(record: Recorded, task: Task | None = None) -> Episode:
    """The episode that comes of a record: `config`, `task_id`, `place`, `calls`, `results`.

    `task` is the task itself; without it, it is looked for in the tasks of the configuration.
    """
    return asyncio.run(_replay(record, task))


async def _replay(record: Recorded, task: Task | None) -> Episode:
    config = build_config(record["config"], begun=True, may_be_idle=True)
    found = task if task is not None else _task(config.data, record["task_id"])
    answers = _Answers(record)
    limits = replace(Limits.from_section(config.rollout), retries=0)
    loop = AgentLoop(
        run_function(config.workflow), NoEngine(), cast(ChatTemplate, None),  # nothing is rendered
        configured_judger(config), limits, journal=_Again(answers),
        new_model=partial(_RecordedModel, answers),
    )  # fmt: skip
    group_id, rollout_idx, seed = record["place"]
    try:
        return await loop.roll_out(RolloutSpec(found, group_id, rollout_idx, seed), sampling_of(config.rollout))
    finally:
        await close_all([loop])


def _task(section: Any, task_id: str) -> Task:
    tasks = load_training(section).tasks
    found = next((task for task in tasks if str(task.id) == task_id), None)
    if found is None:
        raise DataError(
            f'none of the {len(tasks)} tasks is "{task_id}"; give the task itself: replay_episode(RECORD, task)'
        )
    return found


class _Answers(AttemptRecord):
    """What model and tools answered. A judger's verdicts are not given back: it judges again."""

    keeps = True

    def __init__(self, record: Recorded) -> None:
        self.attempt = int(record.get("attempt", 0))
        self.calls = {int(call["output"]["call"]): call for call in record["calls"]}
        self._results = {int(one["number"]): one for one in record["results"] if one["kind"] == "tool"}
        self.why = "it ended before all recorded answers were asked for"

    @property
    def unused(self) -> bool:
        return bool(self.calls or self._results)

    def recall_result(self, number: int, digest: str) -> tuple[Any] | None:
        found = self._results.pop(number, None)
        if found is None:
            return None
        if found["digest"] != digest:
            self.leave(f'tool "{found["name"]}" (answer {number}) was called with something else')
        return (found["payload"],)

    def leave(self, why: str) -> None:
        """The workflow does not do what it did."""
        self.diverged, self.why = True, why
        raise DivergedReplay(f"the workflow did not do again what is recorded: {why}")


class _RecordedModel(Model):
    """Answers from the record, whatever the tokens of the prompt would be."""

    def __init__(self, answers: _Answers, *given: Any) -> None:
        super().__init__(*given)
        self._answers = answers

    async def chat(
        self, messages: Sequence[Message], role: str = "agent", tools: Sequence[ToolSchema] = (), **sampling: Any
    ) -> ModelOutput:
        return await self._recall(OwnedMessages.copy_of(messages), role, sampling)

    async def complete(self, prompt: str | Sequence[int], role: str = "agent", **sampling: Any) -> ModelOutput:
        shown = prompt if isinstance(prompt, str) else list(prompt)
        return await self._recall(OwnedMessages(({"role": "prompt", "content": shown},)), role, sampling)

    async def _recall(self, history: OwnedMessages, role: str, sampling: dict[str, Any]) -> ModelOutput:
        params = self.spending.take_turn(replace(self.sampling, **sampling) if sampling else self.sampling)
        call, self._calls = self._calls, self._calls + 1
        await asyncio.sleep(0)  # as a live call would: others may run
        try:
            output = self._known(call, role, history)
        except DivergedReplay:
            self.give_up()
            raise
        finally:
            self.spending.end_turn(params)
        self.spending.sampled(output, params)
        self._answered.setdefault(role, {})[call] = (output, Step.from_model_output(output, history))
        return output

    def _known(self, call: int, role: str, history: OwnedMessages) -> ModelOutput:
        found = self._answers.calls.pop(call, None)
        if found is None:
            self._answers.leave(f"model call {call} is not on record")
        elif found["role"] != role:
            self._answers.leave(f'model call {call} was of role "{found["role"]}", and is of "{role}"')
        elif list(found["messages"]) != _as_json(history):
            self._answers.leave(f"model call {call} has other messages")
        assert found is not None
        return ModelOutput.from_dict(found["output"])


def _as_json(messages: Sequence[Message]) -> list[Any]:
    return json.loads(json.dumps(list(messages)))


class _Again(RunJournal):
    """Gives the record to the one episode."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers

    def open(self, group_id: int, rollout_idx: int, seed: int) -> AttemptRecord:
        return self._answers

    def restart(self, record: AttemptRecord) -> AttemptRecord:
        raise DivergedReplay(f"the workflow did not do again what is recorded: {self._answers.why}")
