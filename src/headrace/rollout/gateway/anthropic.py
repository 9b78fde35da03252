"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's format."""

from __future__ import annotations

import json
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
    pieces,
    read_function,
    read_sampling,
    read_stop,
    read_text,
    token_details,
    usage,
)
from headrace.rollout.messages import ToolSchema

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
}


class Messages:
    """Content blocks in, content blocks out."""

    path = "/v1/messages"

    def read(self, fields: Fields, before: Conversations) -> Call:
        """The request."""
        messages, tools = read_conversation(fields)
        shared, stop = read_sampling(fields, "max_tokens"), read_stop(fields, "stop_sequences")
        fields.only("thinking", {"type": "disabled"}, remedy="whether the model thinks is up to its chat template")
        fields.ignore("metadata", "service_tier", "inference_geo")
        fields.end()
        return Call(messages=messages, tools=tools, stop=stop, **shared)

    def response(self, call: Call, reply: Reply) -> dict[str, Any]:
        """The complete answer."""
        head = _head(call, reply, usage(reply.output, "input_tokens", "output_tokens", total=None))
        return {**head, "content": list(_blocks(reply)), **_stop(reply), **token_details(call, reply)}

    def events(self, call: Call, reply: Reply) -> Iterator[Event]:
        """The answer as a stream."""
        counts = usage(reply.output, "input_tokens", "output_tokens", total=None)
        head = {**_head(call, reply, {**counts, "output_tokens": 0}), "content": []}
        head |= {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=head)
        for index, block in enumerate(_blocks(reply)):
            yield from _block_events(index, block)
        yield _event("message_delta", delta=_stop(reply), usage=counts, **token_details(call, reply))
        yield _event("message_stop")

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """A refusal."""
        kind = _KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(refusal), "code": refusal.code}}

    def error_event(self, refusal: Refusal) -> Event:
        """A refusal after the stream has started."""
        return "error", self.error(refusal)


def read_conversation(fields: Fields) -> tuple[tuple[Message, ...], tuple[ToolSchema, ...]]:
    """Messages and tools in OpenAI's format, which chat templates expect."""
    given = fields.take("messages", list)
    if not given:
        fields.refuse("messages", "must hold at least one message, got []")
    system = read_text(fields.take("system", (str, list), None), "system", "text")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for found in each(given, "messages"):
        messages += _messages(found)
    return tuple(messages), _tools(fields)


def _tools(fields: Fields) -> tuple[ToolSchema, ...]:
    tools: list[ToolSchema] = []
    for number, found in enumerate(fields.take("tools", list, [])):
        where = f"tools[{number}]"
        Fields(found, where).only("type", "custom", remedy="server-side tools are not supported")
        tools.append(read_function(found, where, "input_schema"))
    choice = Fields(fields.take("tool_choice", dict, {"type": "auto"}), "tool_choice")
    kind = choice.take("type", str)
    if kind not in ("auto", "none"):
        choice.refuse("type", f'must be "auto" or "none", got {kind!r}: decoding cannot be forced'[:300])
    choice.only("disable_parallel_tool_use", False, remedy="how many tools a reply calls is up to the model")
    return tuple(tools) if kind == "auto" else ()


def _messages(found: Fields) -> Iterator[Message]:
    """One Anthropic message can become several: each tool result is a message by itself."""
    role, content = found.take("role", str), found.take("content", (str, list))
    if role not in ("user", "assistant"):
        found.refuse("role", f'must be "user" or "assistant", got {role!r}'[:300])
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    where, texts = f"{found.where}.content", []
    more: Message = {}
    for block in each(blocks, where):
        kind = block.take("type", str)
        if kind == "text":
            texts.append(block.take("text", str))
        elif kind == "tool_result" and role == "user":
            result = read_text(block.take("content", (str, list), ""), f"{block.where}.content", "text")
            yield {"role": "tool", "tool_call_id": block.take("tool_use_id", str), "content": result}
        elif kind == "tool_use" and role == "assistant":
            more.setdefault("tool_calls", []).append(_tool_call(block))
        elif kind == "thinking" and role == "assistant":
            more["reasoning_content"] = block.take("thinking", str)
        else:
            block.refuse("type", f"{kind!r} is not supported in a message of role {role!r}; only text and tools are")
    if texts or role == "assistant":
        yield {"role": role, "content": "".join(texts), **more}


def _tool_call(block: Fields) -> dict[str, Any]:
    function = {"name": block.take("name", str), "arguments": json.dumps(block.take("input", dict, {}))}
    return {"id": block.take("id", str, ""), "type": "function", "function": function}


def _head(call: Call, reply: Reply, counts: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": call.model, "usage": counts}


def _stop(reply: Reply) -> dict[str, Any]:
    reason = "max_tokens" if reply.cut else "stop_sequence" if reply.stopped_by else "end_turn"
    if reply.output.tool_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by if reason == "stop_sequence" else None}


def _blocks(reply: Reply) -> Iterator[dict[str, Any]]:
    output = reply.output
    if output.reasoning is not None:
        yield {"type": "thinking", "thinking": output.reasoning, "signature": ""}
    if output.content or not output.tool_calls:
        yield {"type": "text", "text": output.content}
    for asked in output.tool_calls:
        function = asked["function"]
        arguments = json.loads(function["arguments"])
        yield {"type": "tool_use", "id": asked["id"], "name": function["name"], "input": arguments}


def _block_events(index: int, block: dict[str, Any]) -> Iterator[Event]:
    field, kind = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}.get(
        block["type"], ("input", "input_json_delta")
    )
    text = json.dumps(block["input"]) if field == "input" else block[field]
    yield _event("content_block_start", index=index, content_block={**block, field: {} if field == "input" else ""})
    name = "partial_json" if field == "input" else field
    for piece in pieces(text):
        yield _event("content_block_delta", index=index, delta={"type": kind, name: piece})
    yield _event("content_block_stop", index=index)


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}
