"""An evaluation for people: progress while it runs, a table, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from headrace.evaluation.compare import Difference
from headrace.evaluation.results_file import EvaluationResult, SetResult, curve, sources
from headrace.registry import load_object
from headrace.tracking.terminal import Console, Pulse

_SHOWN = ("tasks", "failed", "reward", "response_tokens", "pass@1_low", "pass@1_high")


class Progressing:
    """Bars on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(console=self._console, transient=True) if self._console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._at = "evaluating"
        self._pulse = Pulse(lambda line: self._console.print(Text(line), soft_wrap=True))

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        else:
            self._pulse.doing(lambda: self._at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulse.close()
        if self._bars is not None:
            self._bars.stop()

    def show(self, name: str, done: int, total: int) -> None:
        """So many episodes of a set are done."""
        self._at = f"{name}: {done} of {total} episodes"
        if self._bars is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done)


def show(table: Table) -> None:
    """Print a table: rather a wrapped line than a cut figure."""
    console = Console(highlight=False)
    console.width = max(console.width, Console(width=1000).measure(table).maximum)
    console.print(table)


def evaluation_table(result: EvaluationResult) -> Table:
    """A row per set, and per source where a set has several; own metrics have a column each."""
    ks = sorted({k for found in result.sets for k, _ in curve(found.metrics)} - {1})
    own = _own_metrics(result)
    table = Table("set", "source", title=f"evaluation of {result.of}")
    for column in ("tasks", "pass@1", "95% interval", *(f"pass@{k}" for k in ks), "reward", "tokens", "failed", *own):
        table.add_column(column, justify="right")
    for found in result.sets:
        for source in ("", *sources(found.metrics)):
            prefix = f"{source}/" if source else ""
            table.add_row("" if source else found.name, source, *_cells(found.metrics, prefix, ks, own))
    return table


def _cells(metrics: Mapping[str, float], prefix: str, ks: list[int], own: list[str]) -> Iterator[str]:
    def figure(key: str, form: str) -> str:
        value = metrics.get(prefix + key)
        return "" if value is None else format(value, form)

    yield figure("tasks", ".0f")
    yield figure("pass@1", ".4f")
    yield f"{figure('pass@1_low', '.3f')} - {figure('pass@1_high', '.3f')}"
    yield from (figure(f"pass@{k}", ".4f") for k in ks)
    yield figure("reward", ".4f")
    yield figure("response_tokens", ".1f")
    yield figure("failed", ".0f")
    yield from ("" if prefix else figure(name, ".4g") for name in own)


def _own_metrics(result: EvaluationResult) -> list[str]:
    """Names of the user's own metrics, as they came."""
    names: dict[str, None] = {}
    for found in result.sets:
        reported = tuple(f"{source}/" for source in sources(found.metrics))
        for name in found.metrics:
            if name not in _SHOWN and not name.startswith(("pass@", "avg@", *reported)):
                names[name] = None
    return list(names)


def comparison_table(differences: list[Difference], title: str) -> Table:
    """A row per set, and per source where a set has several."""
    table = Table("set", "source", title=title)
    for column in ("tasks", "first", "second", "difference", "95% interval", "better", "worse", "same", "p"):
        table.add_column(column, justify="right")
    for found in differences:
        table.add_row(
            "" if found.source else found.set,
            found.source or "",
            str(found.tasks),
            f"{found.first:.4f}",
            f"{found.second:.4f}",
            f"{found.difference:+.4f}",
            f"{found.low:+.3f} to {found.high:+.3f}",
            str(found.better),
            str(found.worse),
            str(found.same),
            f"{found.p_value:.3g}",
        )
    return table


def draw(result: EvaluationResult, path: Path) -> None:
    """The picture of an evaluation."""
    new_score: Any = load_object("headrace.tracking.evaluation_plot:Score")
    scores = [score for found in result.sets for score in _scores(found, new_score)]
    curves = {found.name: curve(found.metrics) for found in result.sets}
    load_object("headrace.tracking.evaluation_plot:draw_evaluation")(scores, curves, path, result.of)


def _scores(found: SetResult, new_score: Any) -> Iterator[Any]:
    for source in ("", *sources(found.metrics)):
        key = f"{source}/pass@1" if source else "pass@1"
        label = f"{found.name}: {source}" if source else found.name
        value, low, high = (found.metrics[key + end] for end in ("", "_low", "_high"))
        yield new_score(label, value, low, high, bool(source))
