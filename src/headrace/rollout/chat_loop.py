"""A conversation: the model, and a function that says what the user answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.data.episode import TerminationReason
from headrace.data.task import Message, Task
from headrace.errors import BudgetExceededError, ConfigError, WorkflowError
from headrace.registry import require_parameters, resolve
from headrace.rollout.model_client import Model
from headrace.utils.threads import call_sync_or_async


class ChatLoop:
    """Workflow "chat_loop": asks, lets `respond(task, messages)` answer for the user, and asks again.

    `respond` gets the conversation so far, the model's reply last, and returns what the user says, a message, or None
    when the conversation is over; plain or async. The judger scores what the model said last.
    """

    def __init__(self, respond: str | Callable[..., Any], system: str = "", max_turns: int = 8) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._respond: Callable[..., Any] = resolve("respond", respond) if isinstance(respond, str) else respond
        require_parameters(self._respond, ("task", "messages"), "respond")
        self._system = system
        self._max_turns = max_turns

    async def run(self, task: Task, model: Model) -> None:
        """Talk until the user has nothing more to say."""
        messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        messages += task.messages
        for _ in range(self._max_turns):
            messages.append((await model.chat(messages)).message)
            answer = await call_sync_or_async(self._respond, task, [dict(message) for message in messages])
            if answer is None:
                return
            messages.append(_message(answer))
        raise BudgetExceededError(f"the user still talks after max_turns = {self._max_turns}", TerminationReason.TURNS)


def _message(answer: Any) -> Message:
    if isinstance(answer, str):
        return {"role": "user", "content": answer}
    if isinstance(answer, dict) and "role" in answer:
        return answer
    raise WorkflowError(f"respond must return text, a message or None, got {answer!r:.100}")
