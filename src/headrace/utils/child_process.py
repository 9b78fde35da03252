"""A program that Headrace runs beside itself: it writes to a log, and ends with Headrace, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.utils.interrupts import stop_signals_blocked
from headrace.utils.reaper import descendants

_REAPER = Path(__file__).with_name("reaper.py")
_TAIL = 8192


class ChildProcess:
    """A running program with all processes that it starts. Killing the trainer kills all of them."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        theirs, self._pipe = os.pipe()
        with log.open("ab") as output, stop_signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-P", str(_REAPER), str(theirs), *command],
                pass_fds=(theirs,),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.close(theirs)

    @property
    def pid(self) -> int:
        """Of the process that watches over the one that watches over the program."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        code = self._process.poll()
        return code - 256 if code is not None and code > 128 else code

    def kill(self) -> None:
        """Kill the program with everything that it has started."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def end(self) -> int | None:
        """Kill it, and wait until all of it has gone."""
        self.kill()
        self._process.wait()
        return self.exit_code()

    def last_output(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def descendants(self) -> list[int]:
        """The processes that run now, the program's own first."""
        return descendants(self.pid)[1:]  # the first is the other one that watches
