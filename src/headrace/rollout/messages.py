"""Messages in one form, whoever wrote them; and tools, for templates that know of them and for those that do not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.data.task import Message
from headrace.data.untrusted import enclosed, is_deeper

ToolSchema = dict[str, Any]
"""`{"type": "function", "function": {"name": …, "description": …, "parameters": JSON schema}}`"""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DEEPEST = 100  # levels of a call's arguments; the stack of whoever reads them next may be nearly full


def normal(messages: Iterable[Message]) -> list[Message]:
    """Messages as templates want them: content is text, a tool call's arguments are an object."""
    return [_normal(message) for message in messages]


def _normal(message: Message) -> Message:
    content = message.get("content")
    calls = message.get("tool_calls")
    if type(content) is str and not calls:
        return message
    changed = {key: value for key, value in message.items() if key != "tool_calls"}
    changed["content"] = _text(content)
    if calls:
        changed["tool_calls"] = [_normal_call(call) for call in calls]
    return changed


def _text(content: Any) -> Any:
    """Text of a list of text parts. Other parts (an image) are left to the template."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _normal_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON, a template shows as it is
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def same_reply(written: Message, reply: Message) -> bool:
    """Whether a message of a conversation is the reply that the model gave; both are in normal form.

    Reasoning that was left out makes it another one. Ids of tool calls do not: not every program keeps them.
    """
    return (
        written.get("role") == "assistant"
        and written.get("content") == reply.get("content")
        and (written.get("reasoning_content") or None) == (reply.get("reasoning_content") or None)
        and _asked(written) == _asked(reply)
    )


def _asked(message: Message) -> list[Any]:
    calls = message.get("tool_calls") or []
    return [call.get("function") if isinstance(call, dict) else call for call in calls]


def split_tool_calls(text: str, tools: Sequence[ToolSchema], call: int) -> tuple[str, tuple[dict[str, Any], ...]]:
    """The text without its tool calls, and the calls: `<tool_call>{…}</tool_call>`, or a reply that is one object.

    What does not name a tool, or is no JSON, stays text: nothing is attributed to the model that it did not say.
    """
    names = {tool["function"]["name"] for tool in tools}
    calls: list[dict[str, Any]] = []

    def take(found: str) -> bool:
        asked = _parsed(found, names)
        if asked is not None:
            name, arguments = asked
            function = {"name": name, "arguments": arguments}
            calls.append({"id": f"call_{call}_{len(calls)}", "type": "function", "function": function})
        return asked is not None

    parts, done = [], 0
    for start, end in enclosed(text, _OPEN, _CLOSE):
        if take(text[start + len(_OPEN) : end - len(_CLOSE)]):
            parts.append(text[done:start])
            done = end
    kept = "".join((*parts, text[done:]))
    if not calls and text.lstrip().startswith("{") and take(text):
        kept = ""
    return (kept.strip() if calls else text), tuple(calls)


def _parsed(text: str, names: set[str]) -> tuple[str, str] | None:
    """The name and, as JSON, the arguments of a call."""
    try:
        asked = json.loads(text)
        if not isinstance(asked, dict) or asked.get("name") not in names or is_deeper(asked, _DEEPEST):
            return None
        arguments = asked.get("arguments", asked.get("parameters", {}))
        return (asked["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
    except (ValueError, TypeError, RecursionError):  # TypeError: a name that is a list
        return None


def written_out(messages: Iterable[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """The conversation for a template that knows no tools: they are described and used in plain text."""
    plain = list(_without_tools(messages))
    if not tools:
        return plain
    described = _described(tools)
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{described}"}, *plain[1:]]
    return [{"role": "system", "content": described}, *plain]


def _without_tools(messages: Iterable[Message]) -> Iterator[Message]:
    for message in messages:
        if message.get("role") == "tool":
            yield {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
        elif message.get("tool_calls"):
            calls = "\n".join(f"<tool_call>\n{json.dumps(asked)}\n</tool_call>" for asked in _asked(message))
            content = f"{message['content']}\n{calls}" if message.get("content") else calls
            yield {"role": "assistant", "content": content}
        else:
            yield message


def _described(tools: Sequence[ToolSchema]) -> str:
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    return (
        "You may call these tools:\n"
        f"{listed}\n"
        'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. '
        "Its answer comes in <tool_response>."
    )
