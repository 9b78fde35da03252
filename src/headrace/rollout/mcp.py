"""Tools of MCP servers, over stdio and HTTP, with the official client. Servers are shared by all episodes of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError

from headrace.errors import ConfigError, InfrastructureError, first_of
from headrace.rollout.tools import Tool
from headrace.utils.child_environment import child_environment
from headrace.utils.deadline import end_task

log = logging.getLogger("headrace")
_START_S = 30.0
_CALL_S = 120.0


class McpServers:
    """Servers by name; each is a URL, a command as a list, or a table with `url`, or `command` and `env`.

    A server that is started finds in its environment what `child_environment` passes on, and `env`.
    """

    def __init__(self, servers: Mapping[str, Any]) -> None:
        self._connections = [_Connection(name, _target(name, given)) for name, given in servers.items()]
        self._starting = asyncio.Lock()

    async def tools(self) -> list[Tool]:
        """What the servers offer. Starts those that are not there, or no longer."""
        async with self._starting:
            return [tool for connection in self._connections for tool in await connection.tools()]

    async def close(self) -> None:
        """Stop them."""
        for connection in self._connections:
            await connection.close()


class _Connection:
    """A client, kept by a task of its own: it must be left by the task that entered it."""

    def __init__(self, name: str, target: StdioServerParameters | str) -> None:
        self._name = name
        self._target = target
        self._keeper: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._client: Client | None = None
        self._tools: list[Tool] = []

    async def tools(self) -> list[Tool]:
        if self._keeper is None or self._keeper.done():
            await self._connect()
        return self._tools

    async def _connect(self) -> None:
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(ready))
        try:
            async with asyncio.timeout(_START_S):
                self._client = await ready
                listed = await self._client.list_tools()
        except TimeoutError:
            await self.close()
            raise InfrastructureError(f'MCP server "{self._name}" did not answer within {_START_S:g} s') from None
        self._tools = [
            Tool(one.name, one.description or "", dict(one.input_schema), self._caller(one.name))
            for one in listed.tools
        ]

    async def _keep(self, ready: asyncio.Future[Client]) -> None:
        try:
            async with Client(self._target, read_timeout_seconds=_CALL_S) as client:
                ready.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if ready.done():  # its calls fail by themselves; why is said here
                log.warning('MCP server "%s" was lost: %s', self._name, first_of(error))
            else:
                failure = InfrastructureError(f'MCP server "{self._name}" cannot be reached: {first_of(error)}')
                ready.set_exception(failure)

    def _caller(self, name: str) -> Any:
        async def call(arguments: dict[str, Any]) -> str:
            assert self._client is not None
            try:
                result = await self._client.call_tool(name, arguments)
            except MCPError as error:
                raise InfrastructureError(f'MCP server "{self._name}", tool "{name}": {error}') from error
            text = "\n".join(getattr(part, "text", f"({part.type})") for part in result.content)
            return f"error: {text}" if result.is_error else text

        return call

    async def close(self) -> None:
        self._closing.set()
        if self._keeper is not None:
            await asyncio.wait([self._keeper], timeout=5.0)
            await end_task(self._keeper, f'MCP server "{self._name}"')


def _target(name: str, given: Any) -> StdioServerParameters | str:
    if isinstance(given, str):
        return given
    table: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"command": given}
    if isinstance(table.get("url"), str):
        return table["url"]
    command = table.get("command")
    if not (isinstance(command, (list, tuple)) and command and all(isinstance(word, str) for word in command)):
        raise ConfigError(
            f'MCP server "{name}" must be a URL, a command as a list of words, or a table with "url" or "command", '
            f"got {given!r}"
        )
    env = child_environment(table.get("env"), f'env of the MCP server "{name}"')
    return StdioServerParameters(command=command[0], args=list(command[1:]), env=env)
