"""What the console shows of a run's metrics: curves above, single numbers below, or one plain line per step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.tracking.base import eval_sets
from headrace.tracking.formats import SPARK_WIDTH, compact, number, seconds, sparkline

if TYPE_CHECKING:
    from headrace.engines.base import EngineHealth

_LABEL_WIDTHS = (8, 12)
# what training is about, the first that the run has: without rollouts there is no reward
_HEADLINES = (("reward", "reward/mean"), ("loss", "policy/loss"), ("loss", "dpo/loss"))


class History:
    """The latest value of every metric, and all values of those drawn as a curve."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """The metrics of one more step."""
        self.latest.update(metrics)
        headlines = (key for _, key in _HEADLINES)
        for key in (*headlines, *(f"eval/{name}/pass@1" for name in eval_sets(metrics))):
            if key in metrics:
                self._values.setdefault(key, []).append(metrics[key])

    def values(self, key: str) -> list[float]:
        """All values of a curve so far."""
        return self._values.get(key, [])


def plain_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """The important metrics of one step, as one line of plain ASCII."""
    parts = [f"step {step}/{total}" if step else "before training"]
    parts += [f"{label} {number(metrics[key])}" for label, key in _headline(metrics)]
    parts += [_evaluation(name, metrics) for name in eval_sets(metrics)]
    for key, word in (("tokens/generated_per_s", "gen"), ("tokens/trained_per_s", "train")):
        if metrics.get(key):  # 0 where nothing is sampled
            parts.append(f"{word} {compact(metrics[key])} tok/s")
    if metrics.get("episodes/failed"):
        parts.append(f"failed {compact(metrics['episodes/failed'])}")
    if metrics.get("staleness/max"):
        parts.append(f"staleness {metrics['staleness/mean']:.1f}, at most {metrics['staleness/max']:.0f}")
    if "time/step_s" in metrics:
        parts.append(f"{seconds(metrics['time/step_s'])} s/step")
    return "  ".join(parts)


def _headline(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and key of the metric to show first, if there is any."""
    return [(label, key) for label, key in _HEADLINES if key in metrics][:1]


def _replicas(replicas: Sequence[EngineHealth]) -> Text:
    """The load of each replica, or why it has none."""
    shown = [
        Text(str(one.running + one.waiting)) if one.state == "serving" and one.error is None
        else Text("lost" if one.error is not None else one.state, style="red" if one.error is not None else "yellow")
        for one in replicas
    ]  # fmt: skip
    return Text.assemble(("replicas ", "dim"), Text(" · ").join(shown))


def engine_line(engine: EngineHealth) -> Text:
    """The state of the engine."""
    state = "stopped" if not engine.alive else "paused" if engine.paused else "decoding" if engine.running else "idle"
    parts = [Text(state, style="" if engine.alive else "red"), _pair("running", str(engine.running))]
    parts += [_pair("waiting", str(engine.waiting)), _pair("version", str(engine.version))]
    if engine.restarts:
        parts.append(Text(f"started again {engine.restarts} times", style="yellow"))
    if engine.replicas:
        parts.append(_replicas(engine.replicas))
    return Text.assemble(("engine    ", "dim"), Text("   ").join(parts))


def body(history: History) -> RenderableType:
    """Curves above, single numbers below; a row without any metric of the run is left out."""
    narrowest, widest = _LABEL_WIDTHS
    label_width = min(widest, max([narrowest, *map(len, eval_sets(history.latest))]))
    tables = _curves(history, label_width), _details(history.latest, label_width)
    blocks = [table for table in tables if table.row_count]
    if len(blocks) == 2:
        return Group(blocks[0], Text(), blocks[1])
    return Group(*blocks)


def _curves(history: History, label_width: int) -> Table:
    """One row per curve: before, now, the curve, its spread."""
    grid = _grid(label_width)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, style="cyan", min_width=SPARK_WIDTH)
    grid.add_column()
    latest = history.latest
    for label, key in _headline(latest):
        spread = f"± {number(latest['reward/std'])}" if "reward/std" in latest else ""
        _add_curve(grid, label, history.values(key), Text(spread, style="dim"))
    for name in eval_sets(latest):
        _add_curve(grid, name, history.values(f"eval/{name}/pass@1"), _interval(name, latest))
    return grid


def _add_curve(grid: Table, label: str, values: Sequence[float], spread: Text) -> None:
    before = f"{number(values[0])} →" if len(values) > 1 else ""
    now = Text(number(values[-1]), style="bold" if math.isfinite(values[-1]) else "bold red")
    grid.add_row(_label(label), Text(before, style="dim"), now, sparkline(values), spread)


def _evaluation(name: str, metrics: Mapping[str, float]) -> str:
    failed = metrics.get(f"eval/{name}/failed")
    suffix = f" ({compact(failed)} failed, see log.txt)" if failed else ""
    return f"eval {name} {number(metrics[f'eval/{name}/pass@1'])}{suffix}"


def _interval(name: str, latest: Mapping[str, float]) -> Text:
    """`0.270–0.350  3 failed`: the interval, and what did not finish."""
    parts: list[Text] = []
    low, high = latest.get(f"eval/{name}/pass@1_low"), latest.get(f"eval/{name}/pass@1_high")
    if low is not None and high is not None:
        parts.append(Text(f"{number(low)}–{number(high)}", style="dim"))
    failed = latest.get(f"eval/{name}/failed")
    if failed:
        parts.append(Text(f"{compact(failed)} failed", style="yellow"))
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
    for label, entries in _ROWS:
        write = number if label == "policy" else compact
        parts = [_pair(word, write(latest[key]) + unit) for word, key, unit in entries if key in latest]
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
        bar.append("━" * (round(SPARK_WIDTH * end_s / total_s) - len(bar)), style=styles[word])
    legend = [Text.assemble((f"{word} ", styles[word]), f"{seconds(value)} s") for word, value in parts.items()]
    return [bar, *legend]


class _Flow:
    """Parts side by side. Lines break between parts, never inside one."""

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
