"""ConsoleTracker: a calm live view on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.tracking import terminal
from headrace.tracking.base import RunInfo, eval_sets

if TYPE_CHECKING:
    from headrace.engines.base import EngineHealth

_MAX_WIDTH = 100
_MIN_WIDTH = 66  # narrower, and the curves' columns no longer fit
_SPARK_WIDTH = 16
_LABEL_WIDTHS = (8, 12)
_BLOCKS = "▁▂▃▄▅▆▇█"
# what training is about, the first that the run has: without rollouts there is no reward
_HEADLINES = (("reward", "reward/mean"), ("loss", "policy/loss"), ("loss", "dpo/loss"))


class ConsoleTracker:
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
        self._history = _History()
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
            self._body = _body(self._history)  # replaced whole: the refresh thread may be reading the one before
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
            live.transient = self._progress is None  # of a run that never began nothing is left
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
        engine = [Text(), _engine_line(self._engine)] if self._engine is not None else []
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
        elapsed, remaining = _duration(now_s - self._started_s), self.remaining_s(now_s)
        if self.step >= self.total:
            times = Text(f"done in {elapsed}", style="green")
        else:
            left = "" if remaining is None else f" · {_duration(remaining)} left"
            times = Text.assemble(elapsed, (left, "dim"))
        count = Text.assemble((str(self.step), "bold"), (f"/{self.total}", "dim"))
        bar = ProgressBar(max(self.total, 1), self.step if self.total else 1, complete_style="cyan")
        grid = Table.grid(expand=True, padding=(0, 2))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(bar, count, times)
        return grid


class _History:
    """The latest value of every metric, and all values of those drawn as a curve."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        self.latest.update(metrics)
        headlines = (key for _, key in _HEADLINES)
        for key in (*headlines, *(f"eval/{name}/pass@1" for name in eval_sets(metrics))):
            if key in metrics:
                self._values.setdefault(key, []).append(metrics[key])

    def values(self, key: str) -> list[float]:
        return self._values.get(key, [])


def plain_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """The important figures of one step, as one line of plain ASCII."""
    parts = [f"step {step}/{total}" if step else "before training"]
    parts += [f"{label} {_figure(metrics[key])}" for label, key in _headline(metrics)]
    parts += [_evaluation(name, metrics) for name in eval_sets(metrics)]
    for key, word in (("tokens/generated_per_s", "gen"), ("tokens/trained_per_s", "train")):
        if metrics.get(key):  # 0 where nothing is sampled
            parts.append(f"{word} {_compact(metrics[key])} tok/s")
    if metrics.get("episodes/failed"):
        parts.append(f"failed {_compact(metrics['episodes/failed'])}")
    if metrics.get("staleness/max"):
        parts.append(f"staleness {metrics['staleness/mean']:.1f}, at most {metrics['staleness/max']:.0f}")
    if "time/step_s" in metrics:
        parts.append(f"{_seconds(metrics['time/step_s'])} s/step")
    return "  ".join(parts)


def _headline(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and key of the one figure to show first, if there is any."""
    return [(label, key) for label, key in _HEADLINES if key in metrics][:1]


def _engine_line(engine: EngineHealth) -> Text:
    state = "stopped" if not engine.alive else "paused" if engine.paused else "decoding" if engine.running else "idle"
    parts = [Text(state, style="" if engine.alive else "red"), _pair("running", str(engine.running))]
    parts += [_pair("waiting", str(engine.waiting)), _pair("version", str(engine.version))]
    if engine.restarts:
        parts.append(Text(f"started again {engine.restarts} times", style="yellow"))
    return Text.assemble(("engine    ", "dim"), Text("   ").join(parts))


def _body(history: _History) -> RenderableType:
    """Curves above, figures below; a row is left out when the run has none of its metrics."""
    narrowest, widest = _LABEL_WIDTHS
    label_width = min(widest, max([narrowest, *map(len, eval_sets(history.latest))]))
    tables = _curves(history, label_width), _details(history.latest, label_width)
    blocks = [table for table in tables if table.row_count]
    if len(blocks) == 2:
        return Group(blocks[0], Text(), blocks[1])
    return Group(*blocks)


def _curves(history: _History, label_width: int) -> Table:
    """One row per curve: before, now, the curve, its spread."""
    grid = _grid(label_width)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, style="cyan", min_width=_SPARK_WIDTH)
    grid.add_column()
    latest = history.latest
    for label, key in _headline(latest):
        spread = f"± {_figure(latest['reward/std'])}" if "reward/std" in latest else ""
        _add_curve(grid, label, history.values(key), Text(spread, style="dim"))
    for name in eval_sets(latest):
        _add_curve(grid, name, history.values(f"eval/{name}/pass@1"), _interval(name, latest))
    return grid


def _add_curve(grid: Table, label: str, values: Sequence[float], spread: Text) -> None:
    before = f"{_figure(values[0])} →" if len(values) > 1 else ""
    now = Text(_figure(values[-1]), style="bold" if math.isfinite(values[-1]) else "bold red")
    grid.add_row(_label(label), Text(before, style="dim"), now, _sparkline(values), spread)


def _evaluation(name: str, metrics: Mapping[str, float]) -> str:
    failed = metrics.get(f"eval/{name}/failed")
    suffix = f" ({_compact(failed)} failed, see log.txt)" if failed else ""
    return f"eval {name} {_figure(metrics[f'eval/{name}/pass@1'])}{suffix}"


def _interval(name: str, latest: Mapping[str, float]) -> Text:
    """`0.270–0.350  3 failed`: the interval, and what did not finish."""
    parts: list[Text] = []
    low, high = latest.get(f"eval/{name}/pass@1_low"), latest.get(f"eval/{name}/pass@1_high")
    if low is not None and high is not None:
        parts.append(Text(f"{_figure(low)}–{_figure(high)}", style="dim"))
    failed = latest.get(f"eval/{name}/failed")
    if failed:
        parts.append(Text(f"{_compact(failed)} failed", style="yellow"))
    return Text("  ").join(parts)


_ROWS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "policy",
        (
            ("loss", "policy/loss", ""),
            ("loss", "dpo/loss", ""),
            ("sft", "sft/loss", ""),
            ("grad", "policy/grad_norm", ""),
            ("entropy", "policy/entropy", ""),
            ("kl", "policy/kl_to_sampler", ""),
            ("clip", "policy/clip_fraction", ""),
            ("lr", "optim/lr", ""),
        ),
    ),
    (
        "tokens",
        (
            ("generate", "tokens/generated_per_s", "/s"),
            ("train", "tokens/trained_per_s", "/s"),
            ("response", "response/length_mean", ""),
        ),
    ),
    (
        "episodes",
        (
            ("trained", "episodes/trained", ""),
            ("filtered", "episodes/filtered", ""),
            ("failed", "episodes/failed", ""),
            ("staleness", "staleness/max", ""),
        ),
    ),
)


def _details(latest: Mapping[str, float], label_width: int) -> Table:
    grid = _grid(label_width)
    grid.add_column()
    for label, figures in _ROWS:
        write = _figure if label == "policy" else _compact
        parts = [_pair(word, write(latest[key]) + unit) for word, key, unit in figures if key in latest]
        if parts:
            grid.add_row(_label(label), _Flow(parts))
    split = _time_split(latest)
    if split:
        grid.add_row(_label("time"), _Flow(split))
    return grid


def _time_split(latest: Mapping[str, float]) -> list[Text]:
    """A bar of where a step's time goes, and its legend; only what is known."""
    known = {word: latest.get(f"time/{word}_s", math.nan) for word in ("generate", "train", "step")}
    parts = {word: value for word, value in known.items() if math.isfinite(value)}
    busy_s = sum(value for word, value in parts.items() if word != "step")
    total_s = max(busy_s, parts.get("step", 0.0))
    if total_s <= 0:
        return []
    styles = {"generate": "cyan", "train": "magenta", "step": "bright_black"}
    bar, end_s = Text(), 0.0
    for word, value in parts.items():
        end_s = total_s if word == "step" else end_s + value
        bar.append("━" * (round(_SPARK_WIDTH * end_s / total_s) - len(bar)), style=styles[word])
    legend = [Text.assemble((f"{word} ", styles[word]), f"{_seconds(value)} s") for word, value in parts.items()]
    return [bar, *legend]


class _Flow:
    """Figures side by side, broken between figures and never inside one."""

    def __init__(self, parts: Sequence[Text]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text()
        for part in self._parts:
            if line and line.cell_len + 3 + part.cell_len > options.max_width:
                yield line
                line = Text()
            line = Text("   ").join([line, part]) if line else part
        yield line


def _grid(label_width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=label_width, no_wrap=True, overflow="ellipsis")
    return grid


def _label(word: str) -> Text:
    return Text(word, style="dim")


def _pair(word: str, shown: str) -> Text:
    broken = shown.startswith(("nan", "inf", "-inf"))
    return Text.assemble((f"{word} ", "dim"), (shown, "red" if broken else ""))


def _sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The whole history in at most `width` characters; non-finite values are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    edges = [i * len(finite) // count for i in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(top * (mean - low) / span) if span else 0] for mean in means)


def _figure(value: float) -> str:
    """A number with about three digits."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:.3f}"
    if size < 1e-3:
        return f"{value:.2g}"
    if size < 10:
        return f"{value:.3f}"
    return f"{value:.1f}" if size < 1000 else _compact(value)


def _compact(value: float) -> str:
    """A count or a rate: 7, 940, 5.2k, 1.3M."""
    if not math.isfinite(value):
        return str(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _can_draw(console: Console) -> bool:
    # isatty too: FORCE_COLOR makes rich call a log file a terminal, which would fill it with redraws
    terminal = console.is_interactive and console.file.isatty()
    return terminal and console.encoding.startswith("utf") and console.width >= _MIN_WIDTH
