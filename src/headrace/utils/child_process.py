"""A program that Headrace runs beside itself: it writes to a log, and ends with Headrace, however that ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.utils.interrupts import stop_signals_blocked
from headrace.utils.reaper import descendants

_REAPER = Path(__file__).with_name("reaper.py")
_TAIL = 65536
# the last line of a traceback, with or without what a server puts before every line
_ERROR = re.compile(r"^(?:\([^()]*\) \w+ [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)


class ChildProcess:
    """A running program with all processes that it starts. Killing the trainer kills all of them."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._begins = log.stat().st_size if log.exists() else 0
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
        return "\n".join(self._tail().splitlines()[-lines:])

    def last_errors(self) -> str:
        """The first error of its log, which often causes the others, and the last; without any, the log's end."""
        found: list[str] = _ERROR.findall(self._tail())
        return "\n".join(dict.fromkeys([found[0], found[-1]])) if found else self.last_output()

    def _tail(self) -> str:
        """What this program has written, or the end of it; the log may begin with earlier ones."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._begins, size - _TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def descendants(self) -> list[int]:
        """The processes that run now, the program's own first."""
        return descendants(self.pid)[1:]  # the first is the other one that watches
