"""POST /v1/chat/completions, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.data.task import Message
from headrace.rollout.gateway.wire import (
    Call,
    Conversations,
    Event,
    Fields,
    Refusal,
    Reply,
    each,
    openai_error,
    pieces,
    read_function,
    read_sampling,
    read_stop,
    read_text,
    token_details,
    usage,
)
from headrace.rollout.messages import ToolSchema

HARMLESS = ("user", "metadata", "store", "service_tier", "seed", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention")  # fmt: skip
"""Fields without effect on the answer. A client's seed is ignored: a resumed episode must sample the same tokens."""


_CHUNK = "chat.completion.chunk"


class ChatCompletions:
    """Messages in, one message out."""

    path = "/v1/chat/completions"

    def read(self, fields: Fields, before: Conversations) -> Call:
        """The request."""
        messages = fields.take("messages", list)
        if not messages:
            fields.refuse("messages", "must hold at least one message, got []")
        shared = read_sampling(fields, "max_tokens", "max_completion_tokens")
        stop, tools = read_stop(fields, "stop"), read_tools(fields)
        options = fields.take("stream_options", dict, {})
        logprobs, top = fields.take("logprobs", bool, False), fields.take("top_logprobs", int, 0)
        if top not in (0, 1):
            fields.refuse("top_logprobs", f"must be 0 or 1, got {top}: only the sampled token's is known")
        refuse_several(fields, "n")
        fields.only("response_format", {"type": "text"}, remedy="ask for the form in the prompt")
        fields.only("modalities", ["text"])
        refuse_changed_sampling(fields)
        fields.ignore(*HARMLESS)
        fields.end()
        return Call(
            messages=tuple(_message(found) for found in each(messages, "messages")),
            tools=tools,
            stop=stop,
            logprobs=logprobs,
            top_logprobs=top,
            usage_in_stream=options.get("include_usage") is True,
            **shared,
        )

    def response(self, call: Call, reply: Reply) -> dict[str, Any]:
        """The complete answer."""
        output = reply.output
        message: Message = {"role": "assistant", "content": output.content or (None if output.tool_calls else "")}
        message["refusal"] = None
        if output.reasoning is not None:
            message["reasoning_content"] = output.reasoning
        if output.tool_calls:
            message["tool_calls"] = list(output.tool_calls)
        choice = {"index": 0, "message": message, "logprobs": _logprobs(call, reply), "finish_reason": _finish(reply)}
        return {**_head(call, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply),
                **token_details(call, reply)}  # fmt: skip

    def opening(self, call: Call, reply: Reply) -> list[Event]:
        """What a stream begins with."""
        return [_chunk(call, reply, {"role": "assistant", "content": ""})]

    def piece(self, call: Call, reply: Reply) -> Event:
        """A piece of a reply, as it is sampled."""
        return _chunk(call, reply, {"content": reply.output.text}, logprobs=_logprobs(call, reply))

    def events(self, call: Call, reply: Reply) -> Iterator[Event]:
        """The answer as a stream."""
        yield _chunk(call, reply, {"role": "assistant", "content": ""}, logprobs=_logprobs(call, reply))
        yield from self.ending(call, reply)

    def ending(self, call: Call, reply: Reply) -> Iterator[Event]:
        """All that comes after the opening."""
        output = reply.output

        def chunk(delta: dict[str, Any], finish: str | None = None) -> Event:
            return _chunk(call, reply, delta, finish)

        for piece in pieces(output.reasoning or ""):
            yield chunk({"reasoning_content": piece})
        for piece in pieces(output.content):
            yield chunk({"content": piece})
        for index, asked in enumerate(output.tool_calls):
            function = asked["function"]
            first = {"index": index, "id": asked["id"], "type": "function"}
            yield chunk({"tool_calls": [{**first, "function": {"name": function["name"], "arguments": ""}}]})
            for piece in pieces(function["arguments"]):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        name, last = chunk({}, _finish(reply))
        assert isinstance(last, dict)
        yield name, {**last, **token_details(call, reply)}
        if call.usage_in_stream:
            yield None, {**_head(call, reply, _CHUNK), "choices": [], "usage": _usage(reply)}
        yield None, "[DONE]"

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """A refusal."""
        return openai_error(refusal)

    def error_event(self, refusal: Refusal) -> Event:
        """A refusal after the stream has started."""
        return None, openai_error(refusal)


def read_tools(fields: Fields) -> tuple[ToolSchema, ...]:
    """The tools that the model sees; none with `tool_choice = "none"`."""
    tools: list[ToolSchema] = []
    for found in each(fields.take("tools", list, []), "tools"):
        found.only("type", "function", remedy="only functions can be called")
        tools.append(read_function(found.take("function", dict), f"{found.where}.function"))
    return choose_tools(fields, tools)


def choose_tools(fields: Fields, tools: list[ToolSchema]) -> tuple[ToolSchema, ...]:
    """The tools that `tool_choice` permits."""
    fields.only("parallel_tool_calls", True, remedy="how many tools a reply calls is up to the model")
    choice = fields.take("tool_choice", (str, dict), "auto")
    if choice not in ("auto", "none"):
        said = f'must be "auto" or "none", got {choice!r}: decoding cannot be forced'
        fields.unsupported("tool_choice", said[:300])
    return () if choice == "none" else tuple(tools)


def refuse_several(fields: Fields, *names: str) -> None:
    """Refuse several answers to one request: a client would expect all of them."""
    for name in names:
        several = fields.take(name, int, 1)
        if several != 1:
            fields.refuse(name, f"is not supported with the value {several}; make several requests")


def refuse_changed_sampling(fields: Fields) -> None:
    """Refuse what would change the sampling distribution in a way that the learner cannot reproduce."""
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, 0, 0.0, remedy="the learner could not reproduce it; leave it at 0")
    fields.only("logit_bias", {}, remedy="the learner could not reproduce it; leave it out")


def _message(found: Fields) -> Message:
    role = found.take("role", str)
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        found.refuse("role", f'must be "system", "developer", "user", "assistant" or "tool", got {role!r}'[:300])
    content = found.take("content", (str, list), None)
    message: Message = {"role": role, "content": read_text(content, f"{found.where}.content", "text")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = found.take(name, str, None)
        if value is not None:
            message[name] = value
    calls = found.take("tool_calls", list, [])
    if calls:
        message["tool_calls"] = [_tool_call(asked) for asked in each(calls, f"{found.where}.tool_calls")]
    return message  # other fields (refusal, annotations, audio) are echoes of answers


def _tool_call(found: Fields) -> dict[str, Any]:
    function = Fields(found.take("function", dict), f"{found.where}.function")
    asked = {"name": function.take("name", str), "arguments": function.take("arguments", str, "{}")}
    return {"id": found.take("id", str, ""), "type": "function", "function": asked}


def _head(call: Call, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": call.model}


def _chunk(call: Call, reply: Reply, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> Event:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    usage = {"usage": None} if call.usage_in_stream else {}
    return None, {**_head(call, reply, _CHUNK), **usage, "choices": [choice]}


def _finish(reply: Reply) -> str:
    if reply.output.tool_calls:
        return "tool_calls"
    return "length" if reply.cut else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    return usage(reply.output, "prompt_tokens", "completion_tokens")


def _logprobs(call: Call, reply: Reply) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    content: list[dict[str, Any]] = []
    for token, logprob in zip(reply.tokens, reply.output.logprobs, strict=True):
        entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
        content.append({**entry, "top_logprobs": [entry] * call.top_logprobs})
    return {"content": content, "refusal": None}
