"""Runs untrusted programs in processes of their own: limited, without network, killed when late.

Three modes, strongest first: "namespace" (namespaces of its own, and a root folder that holds only the interpreter),
"seccomp" (Landlock over files, and a stricter filter of system calls), "none" (limits only). "auto" takes the first of
the first two that works here; which one does is tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import marshal
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from headrace.errors import ConfigError, InfrastructureError
from headrace.judge.cgroups import make_groups, parents, remove_groups
from headrace.judge.folders import remove_folder
from headrace.judge.private import make_private
from headrace.judge.seccomp import call_filter
from headrace.judge.session import Session

log = logging.getLogger("headrace")

T = TypeVar("T")
Mode = Literal["auto", "namespace", "seccomp", "none"]
_LAUNCHER = Path(__file__).with_name("launch.py")
_START_S = 60.0  # for the launcher, on a machine that may be busy: none of it is the program's time
_END_S = 1.0
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/dev/null", "/dev/zero", "/dev/urandom")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HOME": "/work", "TMPDIR": "/work"}


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may use."""

    time_s: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 32
    processes: int = 32
    open_files: int = 64
    output_bytes: int = 262_144


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program. `status` is None if it was killed for its time or for its output."""

    status: int | None
    output: bytes


class Sandbox:
    """Runs Python programs. `run` may be called many times at once; each run is a process tree of its own."""

    def __init__(self, limits: SandboxLimits | None = None, mode: Mode = "auto") -> None:
        if mode not in ("auto", "namespace", "seccomp", "none"):
            raise ConfigError(f'sandbox must be "auto", "namespace", "seccomp" or "none", got "{mode}"')
        self._limits = limits or SandboxLimits()
        self._asked: Mode = mode
        self._found: Mode | None = None

    async def mode(self) -> Mode:
        """The mode that programs run in."""
        if self._found is None:
            self._found = await self._try_modes()
        return self._found

    async def run(self, program: str, payload: bytes, stdin: bytes = b"") -> Ran:
        """Run Python source. It finds `payload` as an open file, whose number is its first argument.

        What it writes to standard output is `output`. InfrastructureError if it could not be started, which nothing
        that it does can bring about.
        """
        return await self._run(await self.mode(), program, payload, stdin)

    async def talk(self, program: str, payload: dict[str, Any], converse: Callable[[Session], T]) -> T:
        """Run Python source, and in a thread `converse` with it; the program gets the numbers of `pipes` as payload."""
        mode = await self.mode()
        with contextlib.ExitStack() as stack:
            to_program, requests = _pipe(stack)
            answers, from_program = _pipe(stack)
            session = Session(requests.fileno(), answers.fileno(), self._limits.time_s, self._limits.output_bytes)
            body = json.dumps({**payload, "pipes": [to_program.fileno(), from_program.fileno()]}).encode()

            async def until_done(process: asyncio.subprocess.Process) -> T:
                to_program.close()
                from_program.close()
                done = _in_thread(converse, session)
                try:
                    return await asyncio.shield(done)
                finally:  # also where the caller gives up: the thread uses the pipes
                    session.close()
                    _kill_group(process)
                    await asyncio.wait([done])

            files = (to_program.fileno(), from_program.fileno())
            return (await self._in_folder(mode, program, body, b"", until_done, files))[0]

    async def _try_modes(self) -> Mode:
        tried: list[Mode] = ["namespace", "seccomp"] if self._asked == "auto" else [self._asked]
        failures = []
        for mode in tried:
            try:
                ran = await self._run(mode, "print(6 * 7)", b"", b"")
            except InfrastructureError as error:
                failures.append(f"{mode}: {error}")
                continue
            if ran.status == 0 and ran.output == b"42\n":
                if mode == "seccomp":
                    make_private()
                if mode != tried[0]:
                    log.warning('programs run in sandbox mode "%s", not "%s" (%s)', mode, tried[0], "; ".join(failures))
                return mode
            failures.append(f"{mode}: a first program ended with status {ran.status}")
        raise InfrastructureError(
            f'no sandbox works here ({"; ".join(failures)}); allow user namespaces, set sandbox = "seccomp" if '
            'programs may read the files of your user, or "none" if you trust them'
        )

    async def _run(self, mode: Mode, program: str, payload: bytes, stdin: bytes) -> Ran:
        async def until_ended(process: asyncio.subprocess.Process) -> int | None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.time_s):
                    return await process.wait()
            return None

        status, output = await self._in_folder(mode, program, payload, stdin, until_ended)
        return Ran(None, b"") if output is None else Ran(None if output[1] else status, output[0])

    async def _in_folder(
        self,
        mode: Mode,
        program: str,
        payload: bytes,
        stdin: bytes,
        until: Callable[[asyncio.subprocess.Process], Awaitable[T]],
        files: tuple[int, ...] = (),
    ) -> tuple[T, tuple[bytes, bool] | None]:
        """Start a program with a folder and control groups of its own; whatever happens, all of it is removed."""
        folder = tempfile.mkdtemp(prefix="headrace-sandbox-")
        os.chmod(folder, 0o777 if os.geteuid() == 0 else 0o700)
        groups = make_groups(self._limits.processes, self._limits.memory_mb + self._limits.disk_mb)
        try:
            with contextlib.ExitStack() as stack:
                given, standard_input = (stack.enter_context(_file_with(data)) for data in (payload, stdin))
                status, launcher_end = _pipe(stack)
                spec = self._spec(
                    mode, program, folder, given.fileno(), launcher_end.fileno(), [str(group) for group in groups]
                )
                process = await asyncio.create_subprocess_exec(
                    *(_interpreter(), "-I", "-S", str(_LAUNCHER), marshal.dumps(spec).hex()),
                    stdin=standard_input,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    cwd=folder,
                    env={},
                    pass_fds=(given.fileno(), launcher_end.fileno(), *files),
                    start_new_session=True,
                )
                launcher_end.close()
                return await self._watch(process, status, until)
        finally:
            await asyncio.to_thread(_clean_up, folder, groups)  # a program may have left very many files

    async def _watch(
        self, process: asyncio.subprocess.Process, status: IO[bytes], until: Callable[..., Awaitable[T]]
    ) -> tuple[T, tuple[bytes, bool] | None]:
        """Read what it says up to the limit; whatever happens, nothing of it is left running."""
        assert process.stdout is not None
        reader = asyncio.create_task(_read(process.stdout, self._limits.output_bytes, process))
        try:
            await _started(status)
            result = await until(process)
        finally:  # also where the caller gives up
            _kill_group(process)
            await process.wait()
            _, late = await asyncio.wait([reader], timeout=_END_S)
            if late:  # in mode "none" something may hold the pipe
                reader.cancel()
        if failed := _rest_of(status):
            raise InfrastructureError(f"a program could not be started: {failed}")
        return result, None if late else reader.result()

    def _spec(
        self, mode: Mode, program: str, folder: str, payload: int, status: int, cgroups: list[str]
    ) -> dict[str, Any]:
        paths = [path for path in _SYSTEM if os.path.lexists(path)]
        if not sys.base_prefix.startswith("/usr"):
            paths.append(os.path.realpath(sys.base_prefix))
        return {
            "mode": mode,
            "parent": os.getpid(),
            "status": status,
            "cgroups": cgroups,
            "filter": _filter_of(mode),
            "needs_landlock": self._asked == "auto",
            "root": folder,
            "paths": paths,
            "disk_mb": self._limits.disk_mb,
            "command": [_interpreter(), "-I", "-S", "-c", program, str(payload)],
            "environment": _ENVIRONMENT if mode == "namespace" else {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            "limits": self._process_limits(counted=mode != "namespace" and bool(cgroups) and "pids" in parents()),
        }

    def _process_limits(self, counted: bool) -> dict[str, int]:
        """By the names of the resource module. `counted`: a control group counts the processes of the program alone."""
        limits, mb = self._limits, 1024 * 1024
        return {
            "RLIMIT_CPU": int(limits.time_s) + 1,
            "RLIMIT_AS": limits.memory_mb * mb,
            "RLIMIT_FSIZE": limits.disk_mb * mb,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
            **({} if counted else {"RLIMIT_NPROC": limits.processes}),
        }


def _interpreter() -> str:
    """The interpreter itself, not the link to it in a virtual environment: what is installed there is not its own."""
    return os.path.realpath(sys.executable)


def _file_with(data: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(data)
    file.seek(0)
    return file


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Both ends of a pipe."""
    read, write = os.pipe()
    return stack.enter_context(os.fdopen(read, "rb", 0)), stack.enter_context(os.fdopen(write, "wb", 0))


def _filter_of(mode: Mode) -> str:
    if mode == "none":
        return ""
    try:
        return call_filter(own_namespaces=mode == "namespace").hex()
    except KeyError:
        raise InfrastructureError(f"no filter of system calls is known for {platform.machine()}") from None


def _in_thread(converse: Callable[[Session], T], session: Session) -> asyncio.Future[T]:
    """In a thread of its own: a shared pool could be full of programs that are waited for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = converse(session)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result, result, error)

    threading.Thread(target=work, daemon=True, name="headrace-judge").start()
    return done


async def _started(status: IO[bytes]) -> None:
    """Wait until the launcher reports that the program starts now."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(status.fileno(), ready.set)
    try:
        async with asyncio.timeout(_START_S):
            await ready.wait()
    except TimeoutError:
        raise InfrastructureError(f"a program did not start within {_START_S:g} s; the machine is overloaded") from None
    finally:
        loop.remove_reader(status.fileno())
    if (reported := os.read(status.fileno(), 1)) != b"+":
        reported += _rest_of(status).encode()
        why = reported.decode(errors="replace") or "the launcher was killed"
        raise InfrastructureError(f"a program could not be started: {why}")


def _rest_of(status: IO[bytes]) -> str:
    """What else the launcher reported: why the program did not start after all."""
    os.set_blocking(status.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        return os.read(status.fileno(), 1000).decode(errors="replace")
    return ""


def _clean_up(folder: str, groups: list[Path]) -> None:
    remove_groups(groups)
    remove_folder(folder)


async def _read(stream: asyncio.StreamReader, most: int, process: asyncio.subprocess.Process) -> tuple[bytes, bool]:
    """(the output, whether it was more than allowed). More than allowed ends the program."""
    output = bytearray()
    while chunk := await stream.read(65536):
        output += chunk[: most - len(output)]
        if len(output) >= most:
            _kill_group(process)
            while await stream.read(65536):
                pass
            return bytes(output), True
    return bytes(output), False


def _kill_group(process: asyncio.subprocess.Process) -> None:
    # also after its end: what it has left behind is in its group, and numbers are not given again so soon
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
