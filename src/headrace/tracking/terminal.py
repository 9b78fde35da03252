"""The console, and progress lines while something slow is running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.text import Text

Doing = str | Callable[[], str]
"""What is being done. A function is called each time it is shown, from another thread."""


class Console(rich.console.Console):
    """Prints text as it is: a name with brackets is no markup.

    If its reader leaves, as `| head` does, it raises an error like any other, where rich would exit.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def on_broken_pipe(self) -> None:
        raise


class Pulse:
    """Prints what is being done where no live view is drawn: after a few silent seconds, then ever more rarely.

    It runs in its own thread, so that it also prints while the event loop is blocked.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        waits_s: tuple[float, ...] = (5.0, 10.0, 20.0, 40.0, 60.0),
    ) -> None:
        self._say, self._clock, self._waits_s = say, clock, waits_s
        self._doing: Doing | None = None
        self._since_s = self._quiet_since_s = clock()
        self._said = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def doing(self, what: Doing | None) -> None:
        """Set what is being done; None for nothing worth a line."""
        if isinstance(what, str) and what == self._doing:
            return
        self._doing, self._since_s = what, self._clock()
        if what is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-pulse", daemon=True)
            self._thread.start()

    def spoke(self) -> None:
        """Something else was printed: stay silent for a while."""
        self._quiet_since_s, self._said = self._clock(), 0

    def line(self) -> str | None:
        """The line to print now, if any; it counts as printed."""
        doing, now_s = self._doing, self._clock()
        wait_s = self._waits_s[min(self._said, len(self._waits_s) - 1)]
        if doing is None or now_s - self._quiet_since_s < wait_s:
            return None
        self._quiet_since_s = now_s
        self._said += 1
        return f"{shown(doing)} ({now_s - self._since_s:.0f} s)"

    def close(self) -> None:
        """Print nothing more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(min(0.5, self._waits_s[0] / 4)):
            line = self.line()
            if line is None:
                continue
            try:
                self._say(line)
            except (OSError, ValueError):  # nobody reads it; printing the next line will raise
                return


def shown(doing: Doing) -> str:
    """What is being done, as a text."""
    return doing if isinstance(doing, str) else doing()


@contextmanager
def working(what: Doing) -> Iterator[Callable[[Doing], None]]:
    """Show what is being done on standard error, live or as a line now and then; yields a function that changes it."""
    console = Console(stderr=True, highlight=False)
    if console.is_interactive:
        with console.status(_Asked(what)) as status:
            yield lambda new: status.update(_Asked(new))
        return
    pulse = Pulse(lambda line: console.print(Text(line), soft_wrap=True))
    pulse.doing(what)
    try:
        yield pulse.doing
    finally:
        pulse.close()


class _Asked:
    """Evaluated each time it is drawn."""

    def __init__(self, doing: Doing) -> None:
        self._doing, self._since_s = doing, time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{shown(self._doing)} ({time.monotonic() - self._since_s:.0f} s)")
