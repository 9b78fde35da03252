"""Shared by all APIs: parsing and validating requests, and the errors that say what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from headrace.data.episode import FinishReason, ModelOutput
from headrace.data.task import Message
from headrace.errors import (
    BudgetExceededError,
    ConfigError,
    DataError,
    EngineError,
    HeadraceError,
    LedgerError,
    PromptTooLongError,
    WorkflowError,
)
from headrace.ledger.episode_record import DivergedReplay
from headrace.rollout.messages import ToolSchema

_PIECES = 4  # of a streamed text: the engine returns complete replies, so more would only cost time
_MISSING = object()
_ROLE = re.compile(r"[\w.-]{1,64}")


class Refusal(WorkflowError):
    """A request that is refused; the client gets the message and the status."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Call:
    """A request, in any API. `prompt` is set if it has text or ids instead of messages.

    `requested_sampling` holds the client's `temperature`, `top_p` and `top_k`. They are ignored: the run decides.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[ToolSchema, ...] = ()
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    requested_sampling: Mapping[str, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids: bool = False
    usage_in_stream: bool = False

    @property
    def role(self) -> str:
        """The trajectory that the call belongs to: "headrace/NAME" as model means NAME, anything else the agent."""
        kind, _, name = self.model.partition("/")
        return name if kind == "headrace" and name else "agent"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a request by `key`, which is `unique` if the client made it.

    `retried`: the request may be a retry.
    """

    key: str
    unique: bool
    retried: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's reply, with what an API may report about it."""

    id: str
    created: int
    output: ModelOutput
    tokens: tuple[str, ...] = ()
    stopped_by: str | None = None
    offset: int = 0
    """Characters of the reply before this piece of it."""

    @property
    def cut(self) -> bool:
        """Whether a token limit ended it."""
        return self.output.finish_reason != FinishReason.STOP


Event = tuple[str | None, dict[str, Any] | str]
"""Name and data of a server-sent event."""


class Conversations(Protocol):
    """Earlier conversations by id (OpenAI's previous_response_id)."""

    def conversation(self, response_id: str) -> tuple[Message, ...] | None: ...


class ApiFormat(Protocol):
    """One API: how its requests are read and its answers written."""

    path: str

    def read(self, fields: Fields, before: Conversations) -> Call:
        """The request, or a Refusal."""
        ...

    def response(self, call: Call, reply: Reply) -> dict[str, Any]:
        """The complete answer."""
        ...

    def events(self, call: Call, reply: Reply) -> Iterator[Event]:
        """The answer as a stream."""
        ...

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """A refusal."""
        ...

    def error_event(self, refusal: Refusal) -> Event:
        """A refusal after the stream has started."""
        ...


class Fields:
    """An object of a request. Each field is taken once; fields that nothing took are refused."""

    def __init__(self, found: Any, where: str = "", warn: Callable[[str], None] | None = None) -> None:
        if not isinstance(found, dict):
            raise Refusal(400, f"{where or 'the body'} must be a JSON object, got {shown(found)}")
        self._left: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
        self.where = where
        self._warn = warn

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The field, which must have one of these types. Without a default it is required."""
        value = self._left.pop(name, default)
        if value is _MISSING:
            self.refuse(name, "is missing")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is not default and not fits:
            wanted = " or ".join(_NAMES.get(one, one.__name__) for one in kinds)
            self.refuse(name, f"must be {wanted}, got {shown(value)}")
        return value

    def only(self, name: str, *allowed: Any, remedy: str = "leave it out") -> None:
        """A field that may only have the values that are in effect anyway."""
        value = self._left.pop(name, _MISSING)
        if value is not _MISSING and not any(type(value) is type(one) and value == one for one in allowed):
            self.unsupported(name, f"is not supported with the value {shown(value)}; {remedy}")

    def ignore(self, *names: str) -> None:
        """Skip fields without effect on the answer."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuse the fields that nothing took."""
        for name in self._left:
            self.unsupported(name, "is not supported; leave it out")

    def unsupported(self, name: str, problem: str) -> None:
        """Refuse an unsupported field or, if the run file says so, warn and ignore it."""
        if self._warn is None:
            self.refuse(name, problem)
        self._warn(f'a client\'s "{name[:200]}" {problem}')

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise a Refusal that names the field."""
        path = f"{self.where}.{name}" if self.where else name
        raise Refusal(400, f'"{path[:200]}" {problem}', "unsupported_value", path[:200])


_NAMES: dict[type, str] = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object"
}  # fmt: skip


def shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_json(raw: bytes) -> Any:
    """The body of a request."""

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        found = json.loads(raw, parse_constant=no_constant)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair would fail later
        return found
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {str(error)[:200] or type(error).__name__}") from None


def read_sampling(fields: Fields, *limits: str) -> dict[str, Any]:
    """The sampling fields that most APIs share, as arguments of Call; `limits` are the API's names of max_tokens."""
    given = [fields.take(name, int, None) for name in limits]
    lengths = [value for value in given if value is not None]
    if any(value < 1 for value in lengths):
        fields.refuse(limits[0], f"must be at least 1, got {min(lengths)}")
    requested = {name: fields.take(name, (int, float), None) for name in ("temperature", "top_p", "top_k")}
    model = fields.take("model", str, "headrace/agent")
    if model.startswith("headrace/") and not _ROLE.fullmatch(model.partition("/")[2]):
        fields.refuse("model", f"{shown(model)} names no role; a role has letters, digits, dots and dashes, 64 at most")
    return {
        "model": model,
        "max_tokens": min(lengths, default=None),
        "requested_sampling": {name: float(value) for name, value in requested.items() if value is not None},
        "stream": fields.take("stream", bool, False),
        "token_ids": fields.take("return_token_ids", bool, False),
    }


def read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    """Text, or a list of texts, that end a reply."""
    found = fields.take(name, (str, list), [])
    words = [found] if isinstance(found, str) else found
    if len(words) > 16 or not all(isinstance(word, str) and word for word in words):
        fields.refuse(name, f"must be up to 16 texts that are not empty, got {shown(found)}")
    return tuple(words)


def read_text(content: Any, where: str, *kinds: str) -> str:
    """Text given as such, or in parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(400, f'"{where}" must be text or a list of parts, got {shown(content)}', param=where)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in kinds or not isinstance(part.get("text"), str):
            raise Refusal(400, f'"{where}" may only hold text here, got {shown(part)}', param=where)
        texts.append(part["text"])
    return "".join(texts)


def read_function(found: Any, where: str, schema: str = "parameters") -> ToolSchema:
    """A tool in OpenAI's format. `strict` is dropped: decoding is not constrained to a schema."""
    fields = Fields(found, where)
    name = fields.take("name", str)
    function = {"name": name, "description": fields.take("description", str, "")}
    return {"type": "function", "function": {**function, "parameters": fields.take(schema, dict, {})}}


def pieces(text: str) -> Iterator[str]:
    """A text in a few pieces."""
    size = max(1, -(-len(text) // _PIECES))
    for at in range(0, len(text), size):
        yield text[at : at + size]


def token_details(call: Call, reply: Reply) -> dict[str, Any]:
    """Token ids, log-probabilities and versions, if the request has "return_token_ids"."""
    if not call.token_ids:
        return {}
    output = reply.output
    ids = {"prompt_token_ids": list(output.prompt_ids), "completion_token_ids": list(output.completion_ids)}
    return {"headrace": {**ids, "logprobs": list(output.logprobs), "versions": list(output.versions)}}


def refusal_of(error: HeadraceError) -> Refusal:
    """The answer to a call that failed."""
    match error:
        case Refusal():
            return error
        case PromptTooLongError():
            return Refusal(400, str(error), "context_length_exceeded", "messages")
        case BudgetExceededError():
            return Refusal(400, str(error), "budget_exceeded")
        case DivergedReplay():
            return Refusal(409, str(error), "diverged_replay")
        case EngineError() | LedgerError():
            return Refusal(500, str(error), "engine_failed")
        case ConfigError() | DataError():
            return Refusal(400, str(error), "invalid_value")
    return Refusal(400, str(error))


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """A refusal in OpenAI's format."""
    kind = {401: "authentication_error", 404: "not_found_error"}.get(refusal.status, "invalid_request_error")
    kind = "server_error" if refusal.status >= 500 else kind
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


def usage(output: ModelOutput, prompt: str, completion: str, total: str | None = "total_tokens") -> dict[str, Any]:
    """Exact token counts, under the API's names."""
    read, sampled = len(output.prompt_ids), len(output.completion_ids)
    return {prompt: read, completion: sampled, **({total: read + sampled} if total else {})}


def each(found: Sequence[Any], where: str) -> Iterator[Fields]:
    """The objects of a list."""
    for number, item in enumerate(found):
        yield Fields(item, f"{where}[{number}]")
