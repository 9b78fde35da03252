"""A session: the model of one episode behind its own URL."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.data.task import Message
from headrace.engines.base import DEFAULT_SAMPLING
from headrace.errors import BudgetExceededError, EngineError, HeadraceError, LedgerError, PromptTooLongError
from headrace.rollout.gateway.wire import Call, Identity, Refusal, Reply, refusal_of
from headrace.rollout.messages import ToolSchema
from headrace.rollout.model_client import Model
from headrace.utils.usercode import reason_of


class Session:
    """Answers the calls that come in for one episode.

    `limit` is the limit that the newest call reached. `fatal` is an error that no program may hide. The workflow gets
    both instead of its client's exception.
    """

    def __init__(self, model: Model, warn_once: Callable[[str], None]) -> None:
        self.id = secrets.token_urlsafe(24)
        self.model = model
        self.limit: HeadraceError | None = None
        self.fatal: Exception | None = None
        self.broken = asyncio.Event()
        """Set together with `fatal`: the program can stop."""
        self.warn_once = warn_once
        self._calls: set[asyncio.Task[Reply]] = set()
        self._running: dict[str, asyncio.Task[Reply]] = {}
        self._answers: dict[str, Reply] = {}
        self._unanswered: Counter[str] = Counter()
        self._conversations: dict[str, tuple[Message, ...]] = {}

    def start(self, call: Call, identity: Identity) -> asyncio.Task[Reply]:
        """Start to answer. A retried request gets the recorded answer, if there is one."""
        key = identity.key
        earlier = self._running.get(key) if identity.unique else None
        answer: Coroutine[Any, Any, Reply]
        answer = self._retry(call, key, earlier) if identity.retried else self._answer(call, key)
        task = asyncio.create_task(answer)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        if identity.unique:
            self._running[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def conversation(self, response_id: str) -> tuple[Message, ...] | None:
        """The messages up to a response, and the response."""
        return self._conversations.get(response_id)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int:
        """Length of a prompt."""
        return len(self.model.template.render(messages, tools))

    async def close(self) -> None:
        """Cancel the running calls; their clients get an error that says that the session has ended."""
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._answers.clear()
        self._conversations.clear()

    def _ended(self, key: str, task: asyncio.Task[Reply]) -> None:
        if self._running.get(key) is task:
            del self._running[key]

    async def _retry(self, call: Call, key: str, earlier: asyncio.Task[Reply] | None) -> Reply:
        """Answer a request that may have been answered before."""
        if earlier is not None:
            # its connection is lost, or there would be no retry; it may still finish before that is noticed
            earlier.cancel()
            await asyncio.wait({earlier})
        if self._unanswered[key]:  # of several identical concurrent requests, this one was not answered
            self._unanswered[key] -= 1
            return await self._answer(call, key)
        return self._answers.get(key) or await self._answer(call, key)

    async def _answer(self, call: Call, key: str) -> Reply:
        try:
            output = await self._sample(call)
        except HeadraceError as error:
            raise self._refusal(error) from error
        except Exception as error:
            self._fail(error)
            raise Refusal(500, f"the call failed: {reason_of(error)}", "internal_error") from error
        except asyncio.CancelledError:
            self._unanswered[key] += 1
            raise
        self.limit = None
        decode = self.model.template.decode
        tokens = tuple(decode([token]) for token in output.completion_ids) if call.logprobs else ()
        reply = Reply(secrets.token_hex(12), int(time.time()), output, tokens, self._stopped_by(call, output))
        self._answers[key] = reply
        if call.prompt is None:
            self._conversations[f"resp_{reply.id}"] = (*call.messages, output.message)
        return reply

    async def _sample(self, call: Call) -> Any:
        sampling = self._sampling(call)
        if call.prompt is not None:
            return await self.model.complete(call.prompt, call.role, **sampling)
        return await self.model.chat(call.messages, call.role, call.tools, **sampling)

    def _sampling(self, call: Call) -> dict[str, Any]:
        """A client may shorten a reply. The run decides about the sampling distribution."""
        own = self.model.sampling.filled(DEFAULT_SAMPLING)
        for name, value in call.requested_sampling.items():
            if value != getattr(own, name):
                self.warn_once(f"clients' {name} is ignored: the run file decides how replies are sampled")
        changed: dict[str, Any] = {}
        if call.max_tokens is not None and call.max_tokens < (own.max_tokens or 0):
            changed["max_tokens"] = call.max_tokens
        if call.stop:
            changed["stop"] = (*(own.stop or ()), *call.stop)
        return changed

    def _stopped_by(self, call: Call, output: Any) -> str | None:
        """The stop string that ended the reply."""
        if not call.stop:
            return None
        rest = self.model.template.decode(output.completion_ids)[len(output.text) :]
        return next((word for word in call.stop if rest.startswith(word)), None)

    def _refusal(self, error: HeadraceError) -> Refusal:
        """The answer to a failed call. No retry would help."""
        match error:
            case PromptTooLongError() | BudgetExceededError():
                self.limit = error
            case EngineError() | LedgerError():
                self._fail(error)
        return refusal_of(error)

    def _fail(self, error: Exception) -> None:
        self.fatal = error
        self.broken.set()
