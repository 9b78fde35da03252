"""WorkerPool: functions that may hang, or eat memory, run in processes that can be killed.

A request over its time limit kills its worker; the next request starts another. Other requests are not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace.errors import ConfigError, InfrastructureError
from headrace.utils.child_environment import child_environment

_START_S = 120.0  # a worker imports its package first, on a machine that may be busy
_LONGEST_ANSWER = 1 << 20


class WorkerTimeoutError(Exception):
    """A request took longer than its limit; its worker is killed."""


class WorkerCrashError(Exception):
    """A worker died at a request: of memory, of a signal."""


class WorkerFailedError(Exception):
    """The function raised; the text is its error."""


class WorkerPool:
    """Calls `function` ("module:function", of JSON-able arguments and result) in `workers` processes.

    A process starts when it is first needed. What was started under an event loop that has ended is started again.
    """

    def __init__(self, function: str, workers: int = 2, time_s: float = 5.0, memory_mb: int = 2048) -> None:
        for name, value in (("workers", workers), ("time_s", time_s), ("memory_mb", memory_mb)):
            if value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        self._function = function
        self._count = workers
        self._time_s = time_s
        self._memory_mb = memory_mb
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._slots = asyncio.Semaphore(workers)

    async def call(self, *arguments: Any, time_s: float | None = None) -> Any:
        """What the function returns; waits for a free worker, which is no part of the time limit (or of `time_s`)."""
        self._adopt_loop()
        limit_s = self._time_s if time_s is None else time_s
        async with self._slots, self._worker() as worker:
            assert worker.stdin is not None and worker.stdout is not None
            request = json.dumps([limit_s, arguments])
            try:
                async with asyncio.timeout(limit_s):
                    worker.stdin.write(request.encode("ascii") + b"\n")
                    await worker.stdin.drain()
                    line = await worker.stdout.readline()
            except TimeoutError:
                raise WorkerTimeoutError(f"took longer than {limit_s:g} s") from None
            except (ConnectionError, ValueError) as error:
                raise WorkerCrashError(f"a worker died: {error}") from None
            if not line.endswith(b"\n"):
                raise WorkerCrashError("a worker died while it worked on the request")
            kind, result = json.loads(line)
        if kind == "error":
            raise WorkerFailedError(result)
        return result

    @property
    def pids(self) -> list[int]:
        """Of the workers that are there now."""
        return sorted(worker.pid for worker in self._all)

    async def close(self) -> None:
        """End all workers."""
        for worker in list(self._all):
            await self._end(worker)

    def _adopt_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            for worker in self._all:
                with contextlib.suppress(ProcessLookupError, RuntimeError):
                    worker.kill()
            self._all, self._idle, self._loop = set(), [], loop
            self._slots = asyncio.Semaphore(self._count)

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """A worker for one request. It is used again only if the request came to its end."""
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            yield worker
        except BaseException:  # also a caller that gives up: what the worker does then is of no use
            await self._end(worker)
            raise
        self._idle.append(worker)

    async def _start(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "headrace.judge.worker", self._function, str(self._memory_mb))
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=child_environment(),
            limit=_LONGEST_ANSWER,
        )  # fmt: skip
        self._all.add(worker)
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await worker.stdout.readline()
        except BaseException:
            await self._end(worker)
            raise
        if line != b"ready\n":
            await self._end(worker)
            raise InfrastructureError(
                f"a worker for {self._function} did not start; try: {sys.executable} -m headrace.judge.worker "
                f"{self._function} {self._memory_mb}"
            )
        return worker

    async def _end(self, worker: asyncio.subprocess.Process) -> None:
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await asyncio.shield(worker.wait())
