"""A model behind a URL, as a workflow sees it: the same as `Model`, without token ids. It can only be evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.data.episode import ModelOutput, OwnedMessages, Step
from headrace.data.seeds import derive_seed
from headrace.data.task import Message
from headrace.engines.base import Generates, Generation, SamplingParams
from headrace.errors import (
    ConfigError,
    EngineError,
    PromptTooLongError,
    RefusedError,
    UnreachableError,
    WorkflowError,
)
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.messages import ToolSchema, split_tool_calls
from headrace.rollout.model_client import Answered, Model

_NOBODY_IS_LET_IN = (401, 403, 404)  # wrong key, wrong path or wrong model: no other request would fare better
_TOO_LONG = ("context length", "context_length", "maximum context", "too long", "max_model_len", "too many tokens")
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


class Reply(Protocol):
    """What a client brings back."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str | None: ...
    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def completion_tokens(self) -> int: ...


class Client(Protocol):
    """What asks the URL: `headrace.engines.openai.OpenAIClient`."""

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        tools: Sequence[ToolSchema] = (),
        seed: int | None = None,
    ) -> Reply: ...


class NoEngine:
    """Stands where a URL is asked in place of an engine."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        raise EngineError("a model behind a URL is asked with messages, not with token ids; use model.chat")


class RemoteModel(Model):
    """Handed to a workflow for one episode. Its Steps hold what was said, and no ids to train on."""

    def __init__(
        self, client: Client, engine: Generates, chat: ChatTemplate, sampling: SamplingParams, seed: int,
        training: bool = False, *more: Any,
    ) -> None:  # fmt: skip
        if training:
            raise ConfigError("a model behind a URL gives no token ids and cannot be trained; use it to evaluate")
        super().__init__(engine, chat, sampling, seed, training, *more)
        self._client = client

    async def complete(self, prompt: str | Sequence[int], role: str = "agent", **sampling: Any) -> ModelOutput:
        raise WorkflowError("a model behind a URL is asked with messages; use model.chat")

    def _prompt_ids(self, answered: Answered, messages: OwnedMessages, tools: Sequence[ToolSchema]) -> tuple[int, ...]:
        return ()

    async def _answer(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, call: int, role: str, history: OwnedMessages,
        tools: Sequence[ToolSchema],
    ) -> ModelOutput:  # fmt: skip
        reply = await self._ask(history, params, tools, derive_seed(self._seed, call))
        self.spending.tokens += reply.completion_tokens
        thought, content = _split_reasoning(reply)
        calls = reply.tool_calls
        if tools and not calls:  # a server that leaves them in the text
            content, calls = split_tool_calls(content, tools, call)
        return ModelOutput(
            text=reply.text,
            content=content,
            reasoning=thought,
            tool_calls=calls,
            prompt_ids=(),
            completion_ids=(),
            logprobs=(),
            model_logprobs=(),
            versions=(),
            finish_reason=reply.finish_reason,
            temperature=1.0 if params.temperature is None else params.temperature,
            call=call,
        )

    async def _ask(
        self, messages: OwnedMessages, params: SamplingParams, tools: Sequence[ToolSchema], seed: int
    ) -> Reply:
        """A refusal is the episode's, unless every other request would be refused too."""
        try:
            return await self._client.chat(messages, params, tools, seed)
        except UnreachableError as error:
            self.failure = EngineError(str(error))
            raise self.failure from error
        except RefusedError as error:
            if error.status in _NOBODY_IS_LET_IN:
                self.failure = EngineError(str(error))
                raise self.failure from error
            if error.status in (400, 413, 422) and any(words in error.body.lower() for words in _TOO_LONG):
                raise PromptTooLongError(str(error)) from error
            raise WorkflowError(str(error)) from error

    def demonstrate(self, messages: Sequence[Message]) -> list[Step]:
        """Not here: a demonstration is token ids."""
        raise WorkflowError("model.demonstrate needs token ids, which a model behind a URL does not give")


def remote_model(client: Client) -> Callable[..., RemoteModel]:
    """What makes the models of an AgentLoop that asks a URL."""

    def new_model(*arguments: Any) -> RemoteModel:
        return RemoteModel(client, *arguments)

    return new_model


def _split_reasoning(reply: Reply) -> tuple[str | None, str]:
    """Reasoning that the server returns separately, or leaves in the text."""
    if reply.reasoning is not None or not reply.text.lstrip().startswith(_THINK_OPEN) or _THINK_CLOSE not in reply.text:
        return reply.reasoning, reply.text
    thought, _, content = reply.text.partition(_THINK_CLOSE)
    return thought.lstrip().removeprefix(_THINK_OPEN).strip("\n"), content.lstrip("\n")
