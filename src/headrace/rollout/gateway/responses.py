"""POST /v1/responses, in OpenAI's format. `previous_response_id` works within the session."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from headrace.data.task import Message
from headrace.rollout.gateway.chat import HARMLESS, choose_tools
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
    read_text,
    token_details,
    usage,
)
from headrace.rollout.messages import ToolSchema

_TEXT = ("input_text", "output_text", "text")


class Responses:
    """Items in, items out."""

    path = "/v1/responses"

    def read(self, fields: Fields, before: Conversations) -> Call:
        """The request."""
        given = fields.take("input", (str, list))
        shared = read_sampling(fields, "max_output_tokens")
        tools = choose_tools(fields, list(_tools(fields)))
        messages = [*_earlier(fields, before), *_messages(given)]
        instructions = fields.take("instructions", str, None)
        if instructions:  # they apply to one response only
            messages = [{"role": "system", "content": instructions}, *messages]
        if not messages:
            fields.refuse("input", "must hold at least one item, got []")
        fields.only("text", {"format": {"type": "text"}}, remedy="ask for the form in the prompt")
        fields.only("truncation", "disabled", remedy="a prompt that is too long is refused")
        fields.only("background", False)
        fields.only("include", [], ["reasoning.encrypted_content"])
        fields.only("top_logprobs", 0, remedy="ask /v1/chat/completions for log-probabilities")
        fields.ignore(*HARMLESS)
        fields.end()
        return Call(messages=tuple(messages), tools=tools, **shared)

    def response(self, call: Call, reply: Reply) -> dict[str, Any]:
        """The complete answer."""
        status = "incomplete" if reply.cut else "completed"
        return {**_head(call, reply, status), "output": list(_items(reply)), "usage": _usage(reply),
                **token_details(call, reply)}  # fmt: skip

    def events(self, call: Call, reply: Reply) -> Iterator[Event]:
        """The answer as a stream."""
        numbers = count()

        def event(kind: str, **data: Any) -> Event:
            return kind, {"type": kind, "sequence_number": next(numbers), **data}

        begun = _head(call, reply, "in_progress")
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(_items(reply)):
            at = {"output_index": index, "item_id": item["id"]}
            empty = {**item, "status": "in_progress"} | ({"content": []} if item["type"] == "message" else {})
            if item["type"] == "function_call":
                empty["arguments"] = ""
            yield event("response.output_item.added", output_index=index, item=empty)
            for kind, data in _inside(item):
                yield event(kind, **at, **data)
            yield event("response.output_item.done", output_index=index, item=item)
        full = self.response(call, reply)
        yield event(f"response.{full['status']}", response=full)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """A refusal."""
        return openai_error(refusal)

    def error_event(self, refusal: Refusal) -> Event:
        """A refusal after the stream has started."""
        return "error", {"type": "error", **openai_error(refusal)}


def _earlier(fields: Fields, before: Conversations) -> tuple[Message, ...]:
    response_id = fields.take("previous_response_id", str, None)
    if response_id is None:
        return ()
    found = before.conversation(response_id)
    if found is None:
        fields.refuse("previous_response_id", f"{response_id[:80]!r} is not a response of this session")
    return found


def _tools(fields: Fields) -> Iterator[ToolSchema]:
    for number, found in enumerate(fields.take("tools", list, [])):
        where = f"tools[{number}]"
        Fields(found, where).only("type", "function", remedy="server-side tools are not supported")
        yield read_function(found, where)


def _messages(given: str | list[Any]) -> list[Message]:
    """Items as messages: the text and tool calls of one assistant turn are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for found in each(given, "input"):
        kind = found.take("type", str, "message")
        if kind == "function_call_output":
            content = read_text(found.take("output", (str, list)), f"{found.where}.output", *_TEXT)
            messages.append({"role": "tool", "tool_call_id": found.take("call_id", str), "content": content})
        elif kind in ("message", "function_call", "reasoning"):
            _add(messages, found, kind)
        else:
            found.refuse("type", f"{kind!r} is not supported; only messages, reasoning and function calls are"[:300])
    return [{key: value for key, value in message.items() if key != "open"} for message in messages]


def _add(messages: list[Message], found: Fields, kind: str) -> None:
    """Add an item to its turn. `open`: the assistant's turn is not finished."""
    role = found.take("role", str) if kind == "message" else "assistant"
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant"):
        found.refuse("role", f'must be "system", "developer", "user" or "assistant", got {role!r}'[:300])
    last = messages[-1] if messages else {}
    if role != "assistant" or not last.get("open") or (kind == "message" and last["content"]):
        last = {"role": role, "content": "", **({"open": True} if role == "assistant" else {})}
        messages.append(last)
    if kind == "message":
        last["content"] = read_text(found.take("content", (str, list)), f"{found.where}.content", *_TEXT)
    elif kind == "reasoning":
        parts = found.take("content", list, [])
        last["reasoning_content"] = read_text(parts, f"{found.where}.content", "reasoning_text")
    else:
        function = {"name": found.take("name", str), "arguments": found.take("arguments", str, "{}")}
        asked = {"id": found.take("call_id", str), "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(asked)


def _head(call: Call, reply: Reply, status: str) -> dict[str, Any]:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools]
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": tools,
        "temperature": reply.output.temperature,
        "top_p": None,
    }


def _items(reply: Reply) -> Iterator[dict[str, Any]]:
    output = reply.output
    status = "incomplete" if reply.cut else "completed"
    if output.reasoning is not None:
        content = [{"type": "reasoning_text", "text": output.reasoning}]
        yield {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": content, "status": status}
    if output.content or not output.tool_calls:
        content = [{"type": "output_text", "text": output.content, "annotations": [], "logprobs": []}]
        yield {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "content": content, "status": status}
    for asked in output.tool_calls:
        item = {"id": f"fc_{reply.id}_{asked['id']}", "type": "function_call", "call_id": asked["id"]}
        yield {**item, **asked["function"], "status": status}


def _inside(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The stream events of an item, between its first and its last one."""
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {"delta": piece}
        yield "response.function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
    elif item["type"] == "message":
        part = item["content"][0]
        yield "response.content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield "response.output_text.delta", {"content_index": 0, "delta": piece, "logprobs": []}
        yield "response.output_text.done", {"content_index": 0, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {"content_index": 0, "part": part}


def _usage(reply: Reply) -> dict[str, Any]:
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {**usage(reply.output, "input_tokens", "output_tokens"), **details}
