"""Workflow "external_agent": starts a program per episode, which calls the model over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.data.task import Task
from headrace.errors import ConfigError, WorkflowError
from headrace.rollout.gateway import ModelSession, close_gateway, model_session
from headrace.rollout.model_client import Model
from headrace.utils.child_environment import child_environment

_TAIL = 64 * 1024  # bytes of output to keep
_SHOWN = 2000  # characters of stderr in an error
_VARIABLE_LIMIT = 100_000  # bytes; systems refuse longer variables
_LEFT_S = 2.0  # for the last output of a program that has ended
_PROXIES = ("NO_PROXY", "no_proxy")


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and output of a program."""

    code: int
    stdout: str
    stderr: str


class ExternalAgent:
    """Starts `command` for each episode, with its task as JSON on stdin and in HEADRACE_TASK.

    Its environment is that of `child_environment` plus `environment`, and points the clients of OpenAI and Anthropic to
    the model. If the last line that it prints is an object with a "reward", that is the reward; otherwise the judger
    decides. Its process group is killed when the program ends and at the episode's deadline.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str] | None = None, folder: str | None = None
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ConfigError(f'command must be a list of words such as ["python", "agent.py"], got {command!r}')
        first = sys.executable if command[0] in ("python", "python3") else command[0]
        if shutil.which(first, path=None if os.sep not in first else "") is None and not Path(first).is_file():
            raise ConfigError(f'there is no program "{command[0]}" to start; give its path, or install it')
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f'folder "{folder}" of the external agent does not exist; create it, or leave it out')
        self._command = (first, *command[1:])
        self._environment = dict(environment or {})
        self._environ()  # a missing variable is reported now
        self._folder = folder

    async def run(self, task: Task, model: Model) -> float | None:
        """One episode."""
        async with model_session(model) as session:
            ended = await self._program(json.dumps(asdict(task), default=repr), session)
            if ended.code != 0:
                said = ended.stderr.strip()[-_SHOWN:] or "it wrote nothing to stderr"
                how = f"with code {ended.code}" if ended.code > 0 else f"by signal {-ended.code}"
                raise WorkflowError(f'the program "{self._command[-1]}" ended {how}: {said}')
        return _reward(ended.stdout)

    async def close(self) -> None:
        """Stop the server at the end of the run."""
        await close_gateway()

    async def _program(self, task: str, session: ModelSession) -> Ended:
        """Run the program until it ends or the engine fails."""
        async with self._started(task, session) as process:
            assert process.stdin and process.stdout and process.stderr
            feeding = asyncio.create_task(_feed(process.stdin, task))
            outputs = [asyncio.create_task(_tail(stream)) for stream in (process.stdout, process.stderr)]
            ending, broken = (asyncio.create_task(it) for it in (process.ended.wait(), session.session.broken.wait()))
            helpers: list[asyncio.Task[Any]] = [feeding, *outputs, ending, broken]
            try:
                await asyncio.wait({ending, broken}, return_when=asyncio.FIRST_COMPLETED)
                _kill(process)  # its children would hold the pipes open
                await asyncio.wait({ending, *outputs}, timeout=_LEFT_S)
                said = [output.result() if output.done() else "" for output in outputs]
                return Ended(process.returncode or 0, *said)
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    @asynccontextmanager
    async def _started(self, task: str, session: ModelSession) -> AsyncIterator[_Process]:
        """The program in its own process group, which is killed at the end of the block."""
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(_TAIL, loop), *self._command, cwd=self._folder, start_new_session=True,
            env=self._variables(task, session),
        )  # fmt: skip
        process = _Process(transport, protocol, loop)
        try:
            yield process
        finally:
            while not process.ended.is_set():
                _kill(process)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.ended.wait(), _LEFT_S)
            _kill(process)  # the leader has ended; kill the rest of its group
            transport.close()

    def _variables(self, task: str, session: ModelSession) -> dict[str, str]:
        named = self._environ()
        variables = named | session.environment() | {name: named[name] for name in self._environment}
        if len(task) <= _VARIABLE_LIMIT:
            variables["HEADRACE_TASK"] = task
        for name in _PROXIES:  # the gateway is never behind a proxy
            variables[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost,::1")))
        return variables

    def _environ(self) -> dict[str, str]:
        return child_environment(self._environment, "environment of the external agent")


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Signals that the program itself has ended; `Process.wait` also waits for all that hold its pipes."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


class _Process(asyncio.subprocess.Process):
    """A program, and an event for its end."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, protocol: _Protocol, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(transport, protocol, loop)
        self.ended = protocol.ended


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process group; its leader may have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _feed(stdin: asyncio.StreamWriter, text: str) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read it
        stdin.write(text.encode())
        await stdin.drain()
    with contextlib.suppress(ConnectionError):
        stdin.close()
        await stdin.wait_closed()


async def _tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while piece := await stream.read(_TAIL):
        tail = (tail + piece)[-_TAIL:]
    return tail.decode(errors="replace")


def _reward(stdout: str) -> float | None:
    """The reward of the last line, if there is one."""
    lines = stdout.strip().splitlines()
    last: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        last = json.loads(lines[-1]) if lines else None
    if not isinstance(last, dict) or "reward" not in last:
        return None
    reward = last["reward"]
    if isinstance(reward, bool | int | float):
        return float(reward)
    raise WorkflowError(f'the program\'s last line has the reward {reward!r}; print {{"reward": a number}}')
