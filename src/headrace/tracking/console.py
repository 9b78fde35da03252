"""ConsoleTracker: a calm live view on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.tracking import terminal
from headrace.tracking.base import RunInfo, Tracker
from headrace.tracking.console_view import History, body, engine_line, plain_line
from headrace.tracking.formats import duration

if TYPE_CHECKING:
    from headrace.engines.base import EngineHealth

_MAX_WIDTH = 100
_MIN_WIDTH = 66  # narrower, and the curves' columns no longer fit


class ConsoleTracker(Tracker):
    """Shows a run to the person who started it.

    `live` says whether to draw the live view; by default it is drawn where the output is a terminal that can.
    """

    def __init__(
        self, console: Console | None = None, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or terminal.Console()
        self._wants_live = _can_draw(self._console) if live is None else live
        self._clock = clock
        self._name = ""
        self._progress: _Progress | None = None
        self._doing: terminal.Doing = ""
        self._pulse = terminal.Pulse(self._write, clock)
        self._history = History()
        self._body: RenderableType = Text()
        self._engine: EngineHealth | None = None
        self._live: Live | None = None

    def start(self, info: RunInfo) -> None:
        """Draw the first view."""
        self._name = info.name
        self._progress = _Progress(info.total_steps, self._clock())
        self._draw()

    def progress(self, doing: terminal.Doing) -> None:
        """Show what is being done: always on a terminal, elsewhere after some seconds without a line."""
        self._doing = doing
        if self._wants_live:
            self._draw()
        else:
            self._pulse.doing(doing)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Redraw with the step's metrics, or print its line."""
        progress = self._progress = self._progress or _Progress(0, self._clock())
        progress.advance(step, self._clock())
        self._history.add(metrics)
        if self._live is None:
            self._print(plain_line(step, progress.total, metrics))
        else:
            self._body = body(self._history)  # replaced, not changed: the refresh thread may be reading the old one
            self._live.refresh()

    def message(self, text: str) -> None:
        """Print a line; on a terminal it goes above the view."""
        self._print(text)

    def status(self, engine: EngineHealth) -> None:
        """Show the engine's state in the live view; that it was restarted is a warning of its own."""
        self._engine = engine

    def close(self) -> None:
        """Leave the last view on the screen and give the terminal back."""
        self._doing = ""
        self._pulse.close()
        live, self._live = self._live, None
        if live is not None:
            live.transient = self._progress is None  # a run that never began leaves nothing
            live.stop()  # shows the cursor again even if the last drawing fails

    def _draw(self) -> None:
        if self._wants_live and self._live is None:
            # once a second is enough for the clock; log() redraws at once, and drawing takes time from training
            self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=1)
            self._live.start()

    def _print(self, text: str) -> None:
        self._pulse.spoke()
        self._write(text)

    def _write(self, text: str) -> None:
        # a log file gets one line, however long; above the live view, lines break between words
        self._console.print(Text(text), soft_wrap=self._live is None)

    def _view(self) -> RenderableType:
        now = Text(terminal.shown(self._doing), style="dim")
        if self._progress is None:  # the run is being loaded
            return now
        title = Text.assemble("headrace  ", (self._name, "bold default"))
        engine = [Text(), engine_line(self._engine)] if self._engine is not None else []
        doing = [Text(), now] if now else []
        content = Group(self._progress.bar(self._clock()), Text(), self._body, *engine, *doing)
        width = min(self._console.width, _MAX_WIDTH)
        return Panel(content, title=title, title_align="left", border_style="bright_black", width=width, padding=(1, 2))


class _Progress:
    """Steps done and the time they take, measured in this process: a resumed run starts late."""

    def __init__(self, total: int, now_s: float) -> None:
        self.total = total
        self.step = 0
        self._started_s = now_s
        self._base: tuple[int, float] | None = None  # the step after which the pace is measured, and when it ended
        self._last_s = now_s

    def advance(self, step: int, now_s: float) -> None:
        if self._base is None:
            self._base = (0, now_s) if step == 0 else (step - 1, self._started_s)
        self.step, self._last_s = step, now_s

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds to go at the pace so far; None while there is no pace."""
        if self._base is None or self.step <= self._base[0]:
            return None
        pace_s = (self._last_s - self._base[1]) / (self.step - self._base[0])
        return max(0.0, pace_s * (self.total - self.step) - (now_s - self._last_s))

    def bar(self, now_s: float) -> RenderableType:
        elapsed, remaining = duration(now_s - self._started_s), self.remaining_s(now_s)
        if self.step >= self.total:
            times = Text(f"done in {elapsed}", style="green")
        else:
            left = "" if remaining is None else f" · {duration(remaining)} left"
            times = Text.assemble(elapsed, (left, "dim"))
        count = Text.assemble((str(self.step), "bold"), (f"/{self.total}", "dim"))
        bar = ProgressBar(max(self.total, 1), self.step if self.total else 1, complete_style="cyan")
        grid = Table.grid(expand=True, padding=(0, 2))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(bar, count, times)
        return grid


def _can_draw(console: Console) -> bool:
    # isatty too: FORCE_COLOR makes rich call a log file a terminal, which would fill it with redraws
    terminal = console.is_interactive and console.file.isatty()
    return terminal and console.encoding.startswith("utf") and console.width >= _MIN_WIDTH
