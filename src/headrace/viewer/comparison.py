"""What the pages of an evaluation and of a comparison show."""

from __future__ import annotations

import re
from typing import Any

from headrace.errors import ConfigError
from headrace.evaluation.sides import SideTask, compare_sides, evaluation_side, training_side
from headrace.ledger.export import plain
from headrace.viewer.store import Missing, RunShelf, RunView
from headrace.viewer.texts import short

_MOST_TASKS = 500
_PLACE = re.compile(r"(?P<run>.+)@(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?")


def evaluation_page(view: RunView, step: int, name: str) -> dict[str, Any]:
    """An evaluation task by task, the worst first."""
    with view.ledger() as reader:
        metrics = next((one.metrics for one in reader.evaluations() if (one.step, one.name) == (step, name)), None)
        if metrics is None:
            raise Missing(f'"{name}" was not evaluated at step {step}')
        rows = reader.rows(
            "SELECT e.eval_episode_id, e.task_id, e.source, e.reward, e.is_correct, e.termination, e.error, "
            "e.generated_tokens FROM eval_episodes e JOIN evaluations v USING (evaluation_id) "
            "WHERE v.step = ? AND v.name = ? ORDER BY e.reward, e.eval_episode_id LIMIT 2000",
            (step, name),
        )
    names = ("id", "task_id", "source", "reward", "is_correct", "termination", "error", "tokens")
    episodes: list[dict[str, Any]] = [
        dict(zip(names, (short(plain(value)) for value in row), strict=True)) for row in rows
    ]
    for row in episodes:
        row["task_id"] = short(str(row["task_id"]))
        row["is_correct"] = None if row["is_correct"] is None else bool(row["is_correct"])
    return {"step": step, "set": name, "metrics": plain(metrics), "episodes": episodes}


def compare_page(shelf: RunShelf, first: str, second: str, name: str | None) -> dict[str, Any]:
    """Two sides on the same tasks: RUN@STEP of an evaluated set, or RUN@STEP or RUN@FIRST-LAST of training."""
    one, other = (_side(shelf, place, name) for place in (first, second))
    found = plain(compare_sides(one, other, name or "training").to_dict())
    return {**found, "first": first, "second": second, "set": name, "cut": len(found["tasks"]) > _MOST_TASKS} | {
        "tasks": found["tasks"][:_MOST_TASKS]
    }


def _side(shelf: RunShelf, place: str, name: str | None) -> dict[str, SideTask]:
    parts = _PLACE.fullmatch(place)
    if parts is None:
        raise ConfigError(f'a side is RUN@STEP, or RUN@FIRST-LAST of training, got "{place[:80]}"')
    first, last = int(parts["first"]), int(parts["last"] or parts["first"])
    with shelf.run(parts["run"]).ledger() as reader:
        if name:
            return evaluation_side(reader, first, name)
        return training_side(reader, first - 1, last)
