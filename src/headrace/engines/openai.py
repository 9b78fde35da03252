"""A client of any URL that speaks OpenAI's chat protocol: messages in; text, reasoning and tool calls out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.episode import FinishReason
from headrace.data.task import Message
from headrace.engines.base import SamplingParams
from headrace.engines.http import HttpJson
from headrace.errors import RefusedError

_PATH = "/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the model behind a URL said. Token counts are the server's; 0 if it returns none."""

    text: str
    reasoning: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class OpenAIClient:
    """Asks one model behind one URL, such as `http://localhost:8000/v1`.

    Failures of connection and server are tried again; then they are an InfrastructureError. A request that the server
    refuses is a RefusedError at once.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 5,
        max_concurrent: int = 64,
    ) -> None:
        self.url = url.rstrip("/").removesuffix(_PATH) + _PATH
        self.model = model
        self._http = HttpJson(api_key_env, timeout_s, retries, max_concurrent)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        tools: Sequence[dict[str, Any]] = (),
        seed: int | None = None,
    ) -> ChatReply:
        """One reply to a conversation."""
        payload = {"model": self.model, "messages": list(messages), **_sampling(params)}
        if tools:
            payload["tools"] = list(tools)
        if seed is not None:
            payload["seed"] = seed & 0x7FFFFFFF  # some servers keep it in 32 bits
        return _reply(self.url, await self._http.post(self.url, payload))

    async def close(self) -> None:
        """Let connections go."""
        await self._http.close()


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Only what is set: a server refuses, or silently ignores, keys that it does not know."""
    asked: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "top_k": params.top_k or None,
        "stop": list(params.stop or ()) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "ignore_eos": params.ignore_eos or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _reply(url: str, body: Any) -> ChatReply:
    try:
        choice = body["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        calls = tuple(_call(call, number) for number, call in enumerate(message.get("tool_calls") or ()))
    except (KeyError, IndexError, TypeError, AttributeError):
        shown = str(body)[:200]
        raise RefusedError(f"{url} answered with something else than a chat completion: {shown}", 200, shown) from None
    usage = body.get("usage") or {}
    return ChatReply(
        text=text if isinstance(text, str) else "".join(str(part.get("text", "")) for part in text),
        reasoning=message.get("reasoning_content") or message.get("reasoning"),
        tool_calls=calls,
        finish_reason=FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
    )


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments") or "{}"},
    }
