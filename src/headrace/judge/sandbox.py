"""Runs programs that nobody has read, in processes of their own: limited, without network, killed when late.

Three modes, strongest first: "namespace" (namespaces of its own, and a root folder that holds only the interpreter),
"seccomp" (a filter of system calls; files of other users stay as protected as they are), "none" (limits only).
"auto" takes the first of the first two that works here; which one does is tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from headrace.errors import ConfigError, InfrastructureError

log = logging.getLogger("headrace")

Mode = Literal["auto", "namespace", "seccomp", "none"]
_LAUNCHER = Path(__file__).with_name("launch.py")
_NO_SANDBOX = 125  # exit status of the launcher
_START_S = 1.0  # on top of the program's own time, for the launcher
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/dev/null", "/dev/zero", "/dev/urandom")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/work", "OMP_NUM_THREADS": "1"}


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
    report: bytes


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

        What it writes to standard output is `output`; what it writes to standard error is `report`.
        """
        ran = await self._run(await self.mode(), program, payload, stdin)
        if ran.status == _NO_SANDBOX and ran.report.startswith(b"sandbox: "):
            raise InfrastructureError(f"a program could not be started: {ran.report.decode(errors='replace').strip()}")
        return ran

    async def _try_modes(self) -> Mode:
        tried: list[Mode] = ["namespace", "seccomp"] if self._asked == "auto" else [self._asked]
        said = []
        for mode in tried:
            ran = await self._run(mode, "print(6 * 7)", b"", b"")
            if ran.status == 0 and ran.output == b"42\n":
                if mode != tried[0]:
                    log.warning('programs run in sandbox mode "%s": %s', mode, "; ".join(said))
                return mode
            said.append(f"{mode}: {ran.report.decode(errors='replace').strip()[:300] or f'status {ran.status}'}")
        raise InfrastructureError(
            f'no sandbox works here ({"; ".join(said)}); allow user namespaces, or set sandbox = "none" '
            "if you trust the programs"
        )

    async def _run(self, mode: Mode, program: str, payload: bytes, stdin: bytes) -> Ran:
        folder = tempfile.TemporaryDirectory(prefix="headrace-sandbox-", ignore_cleanup_errors=True)
        os.chmod(folder.name, 0o777 if os.geteuid() == 0 else 0o700)
        try:
            return await self._run_in(folder.name, mode, program, payload, stdin)
        finally:
            await asyncio.to_thread(folder.cleanup)  # a program may have left very many files

    async def _run_in(self, folder: str, mode: Mode, program: str, payload: bytes, stdin: bytes) -> Ran:
        with _file_with(payload) as given, _file_with(stdin) as asked:
            spec = json.dumps(self._spec(mode, program, folder, given.fileno()))
            process = await asyncio.create_subprocess_exec(
                *(_interpreter(), "-I", "-S", str(_LAUNCHER), spec),
                stdin=asked,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env={},
                pass_fds=(given.fileno(),),
                start_new_session=True,
            )
            return await self._watch(process)

    async def _watch(self, process: asyncio.subprocess.Process) -> Ran:
        """Read what it says up to the limit; whatever happens, nothing of it is left running."""
        assert process.stdout is not None and process.stderr is not None
        most = self._limits.output_bytes
        readers = [asyncio.create_task(_read(stream, most, process)) for stream in (process.stdout, process.stderr)]
        killed = False
        try:
            async with asyncio.timeout(self._limits.time_s + _START_S):
                await process.wait()
        except TimeoutError:
            killed = True
        finally:  # also where the caller gives up
            _kill_group(process)
            status = await process.wait()
            _, late = await asyncio.wait(readers, timeout=_START_S)
            for reader in late:  # in mode "none" something may have left the group, and holds the pipe
                reader.cancel()
        if late:
            return Ran(None, b"", b"")
        (output, cut), (report, report_cut) = (reader.result() for reader in readers)
        return Ran(None if killed or cut or report_cut else status, output, report)

    def _spec(self, mode: Mode, program: str, folder: str, payload: int) -> dict[str, Any]:
        limits, mb = self._limits, 1024 * 1024
        seconds = int(limits.time_s) + 1
        paths = [path for path in _SYSTEM if os.path.lexists(path)]
        if not sys.base_prefix.startswith("/usr"):
            paths.append(os.path.realpath(sys.base_prefix))
        return {
            "mode": mode,
            "parent": os.getpid(),
            "root": folder,
            "paths": paths,
            "disk_mb": limits.disk_mb,
            "command": [_interpreter(), "-I", "-S", "-c", program, str(payload)],
            "environment": _ENVIRONMENT if mode == "namespace" else {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            "limits": {
                "RLIMIT_CPU": seconds,
                "RLIMIT_AS": limits.memory_mb * mb,
                "RLIMIT_FSIZE": limits.disk_mb * mb,
                "RLIMIT_NPROC": limits.processes,
                "RLIMIT_NOFILE": limits.open_files,
                "RLIMIT_CORE": 0,
            },
        }


def _interpreter() -> str:
    """The interpreter itself, not the link to it in a virtual environment: what is installed there is not its own."""
    return os.path.realpath(sys.executable)


def _file_with(data: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(data)
    file.seek(0)
    return file


async def _read(stream: asyncio.StreamReader, most: int, process: asyncio.subprocess.Process) -> tuple[bytes, bool]:
    """(what was said, whether it was more than allowed); more than allowed ends the program."""
    said = bytearray()
    while chunk := await stream.read(65536):
        said += chunk[: most - len(said)]
        if len(said) >= most:
            _kill_group(process)
            while await stream.read(65536):
                pass
            return bytes(said), True
    return bytes(said), False


def _kill_group(process: asyncio.subprocess.Process) -> None:
    # also after its end: what it has left behind is in its group, and numbers are not given again so soon
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
