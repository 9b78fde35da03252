"""Tools: Python functions with typed signatures, described to the model and called with what it asks for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from headrace.data.episode import TerminationReason
from headrace.data.task import Message, Task
from headrace.errors import BudgetExceededError, ConfigError, HeadraceError, InfrastructureError
from headrace.registry import load_object, resolve
from headrace.rollout.messages import ToolSchema
from headrace.rollout.model_client import Model
from headrace.utils.threads import call_sync_or_async
from headrace.utils.usercode import reason_of

_LONGEST = 20_000  # characters of an answer that the model is shown


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that the model may call by name. `call` gets the arguments that the model wrote, as an object."""

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[Any]] = field(repr=False)

    @property
    def schema(self) -> ToolSchema:
        """As models and `Model.chat` want it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def tool(function: Callable[..., Any]) -> Tool:
    """A tool of a plain or async function: its parameters are typed, its docstring is the description for the model."""
    name = getattr(function, "__name__", type(function).__name__)
    arguments = _arguments_model(function, name)
    schema = arguments.model_json_schema()
    schema.pop("title", None)
    for described in schema.get("properties", {}).values():
        described.pop("title", None)

    async def call(given: dict[str, Any]) -> Any:
        checked = arguments.model_validate(given)
        return await call_sync_or_async(function, **{key: getattr(checked, key) for key in arguments.model_fields})

    return Tool(name, inspect.getdoc(function) or "", schema, call)


def _arguments_model(function: Callable[..., Any], name: str) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    signature = inspect.signature(function, eval_str=True)
    for key, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f'tool "{name}": parameter "{key}" must be an ordinary one, which has a name')
        if parameter.annotation is parameter.empty:
            raise ConfigError(f'tool "{name}": parameter "{key}" has no type; write {key}: str, for example')
        fields[key] = (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
    return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)


def as_tools(given: Iterable[Any]) -> list[Tool]:
    """Tools given as Tool, function, or "module:function"."""
    found = []
    for item in given:
        target = resolve("tool", item) if isinstance(item, str) else item
        found.append(target if isinstance(target, Tool) else tool(target))
    names = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two tools have the name {twice[0]!r}; a model could not distinguish them")
    return found


async def answer_calls(model: Model, calls: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Message]:
    """Do what the model asked for, one call after the other; the answers as messages.

    A call that fails is answered with the error: the model may do better. Infrastructure that fails ends the attempt.
    """
    known = {one.name: one for one in tools}
    answers: list[Message] = []
    for asked in calls:
        name = asked["function"]["name"]
        answer = await _answer(model, known.get(name), name, asked["function"]["arguments"])
        answers.append({"role": "tool", "tool_call_id": asked["id"], "name": name, "content": answer})
    return answers


async def _answer(model: Model, found: Tool | None, name: str, arguments: str) -> str:
    if found is None:
        return f"error: there is no tool {name!r}"

    async def call(given: dict[str, Any]) -> str:
        try:
            return as_text(await found.call(given))
        except (InfrastructureError, ConnectionError, TimeoutError):
            raise
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: {wrong}"
        except HeadraceError:
            raise
        except Exception as error:  # what the tool says is wrong is for the model to read
            return f"error: {reason_of(error)}"

    call.__name__ = name
    return await model.tool(call, json.loads(arguments))


def as_text(answer: Any) -> str:
    """What the model is shown of an answer: text as it is, anything else as JSON; cut if it is very long."""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text) - _LONGEST:,} more characters)"


class ToolAgent:
    """Workflow "tool_agent": the model calls tools until it answers without calling any.

    `tools` are functions, `mcp` servers whose tools are offered too, each a command to start or a URL.
    """

    def __init__(
        self, tools: Sequence[Any] = (), mcp: dict[str, Any] | None = None, system: str = "", max_turns: int = 8
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._tools = as_tools(tools)
        self._servers: Any = load_object("headrace.rollout.mcp:McpServers")(mcp) if mcp else None
        self._system = system
        self._max_turns = max_turns
        if not (self._tools or mcp):
            raise ConfigError('workflow "tool_agent" has no tools; set workflow.args.tools or workflow.args.mcp')

    async def run(self, task: Task, model: Model) -> None:
        """Ask, do what was asked for, and ask again."""
        messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        messages += task.messages
        tools = await self._offered()
        schemas = [one.schema for one in tools]
        for _ in range(self._max_turns):
            reply = await model.chat(messages, tools=schemas)
            if not reply.tool_calls:
                return
            messages += [reply.message, *await answer_calls(model, reply.tool_calls, tools)]
        raise BudgetExceededError(
            f"the agent still calls tools after max_turns = {self._max_turns}", TerminationReason.TURNS
        )

    async def close(self) -> None:
        """Stop the MCP servers."""
        if self._servers is not None:
            await self._servers.close()

    async def _offered(self) -> list[Tool]:
        if self._servers is None:
            return self._tools
        return as_tools([*self._tools, *await self._servers.tools()])
