"""What the pages of runs and of one run show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, LedgerError
from headrace.ledger.export import plain
from headrace.ledger.reader import LedgerReader
from headrace.registry import nearest
from headrace.run.checkpoint import list_checkpoints, step_of
from headrace.tracking.catalogue import SECTIONS, find
from headrace.viewer.folders import changed_at, warnings_of
from headrace.viewer.metrics import MetricsTable, thinned
from headrace.viewer.store import Missing, RunShelf, RunView

_MOST_POINTS = 5000
_ENDINGS = ("trained", "filtered", "failed", "stale")


def runs_page(shelf: RunShelf) -> dict[str, Any]:
    """All runs, the one that changed last first."""
    rows = [summary_of(view) for view in shelf.runs()]
    rows.sort(key=lambda row: -(row["changed_at"] or 0))
    return {"root": shown_path(shelf.root), "runs": rows}


def shown_path(folder: Path) -> str:
    """As a person at the terminal would name it."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def summary_of(view: RunView) -> dict[str, Any]:
    """One line of the list of runs. A run whose ledger cannot be read is listed with the reason."""
    config, state = view.config, view.state()
    with view.metrics() as table:
        metrics = {
            "step": max(table.steps, default=0),
            "reward": table.last("reward/mean"),
            "sparkline": table.sparkline("reward/mean"),
            "evaluation": _last_evaluation(table),
        }
    facts: dict[str, Any] = {"started_at": None, "processes": 0, "episodes": 0, "problem": None}
    try:
        with view.ledger() as reader:
            processes = reader.processes()
            facts["started_at"] = processes[0].started_at if processes else None
            facts |= {"processes": len(processes), "episodes": reader.account().dispatched}
    except (LedgerError, Missing) as error:
        facts["problem"] = str(error)
    return {
        "id": view.id,
        "path": shown_path(view.folder),
        "state": state.word,
        "why": state.why,
        "steps": _get(config, "trainer", "steps"),
        "model": _get(config, "model", "name"),
        "workflow": _get(config, "workflow", "name"),
        "algorithm": _get(config, "algorithm", "estimator"),
        "staleness": _get(config, "trainer", "max_staleness"),
        "changed_at": changed_at(view.folder),
        **metrics,
        **facts,
    }


def _get(config: dict[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _last_evaluation(table: MetricsTable) -> dict[str, Any] | None:
    """pass@1 of the first set, with its interval and how it went before training."""
    key = next((key for key in table.columns if key.startswith("eval/") and key.endswith("/pass@1")), None)
    if key is None:
        return None
    values = [value for value in table.columns[key] if not math.isnan(value)]
    return {
        "set": key.removeprefix("eval/").removesuffix("/pass@1"),
        "pass@1": values[-1],
        "first": values[0],
        "low": table.last(f"{key}_low"),
        "high": table.last(f"{key}_high"),
    }


def run_page(view: RunView) -> dict[str, Any]:
    """Everything about a run but its curves."""
    found = summary_of(view)
    with view.metrics() as table:
        keys = sorted(table.columns)
        last = {key: table.last(key) for key in keys}
        sampled, trained = (_total(table, key) for key in ("tokens/generated", "tokens/trained"))
    found |= {
        "config": view.config,
        "keys": [_described(key) for key in keys],
        "metrics": last,
        "warnings": warnings_of(view.folder),
        "checkpoints": [step_of(path) for path in list_checkpoints(view.folder)],
        "sampled_tokens": sampled,
        "trained_tokens": trained,
        "account": None,
        "evaluations": [],
    }
    try:
        with view.ledger() as reader:
            found |= _recorded(reader)
    except (LedgerError, Missing) as error:
        found["problem"] = str(error)
    return found


def _recorded(reader: LedgerReader) -> dict[str, Any]:
    processes = reader.processes()
    last = reader.last_weight_sync()
    return {
        "account": _plain_account(reader.account()),
        "accounts": {source: _plain_account(account) for source, account in reader.accounts().items()},
        "restarted": reader.restarted(),
        "starts": [
            {
                "started_at": one.started_at,
                "ended_at": one.ended_at,
                "pid": one.pid,
                "host": one.host,
                "resumed_from": one.resumed_from,
                "last_sign_at": last_sign(reader, one.started_at, following) if one.ended_at is None else None,
            }
            for one, following in zip(processes, [*(one.started_at for one in processes[1:]), None], strict=True)
        ],
        "evaluations": [
            {"step": one.step, "set": one.name, "metrics": plain(one.metrics)} for one in reader.evaluations()
        ],
        "version": last.version if last else None,
        "batches": reader.batch_count(),
        "groups": (reader.last_group_id() or 0) + 1 if reader.last_group_id() is not None else 0,
        "ledger_bytes": reader.size_bytes(),
    }


def last_sign(reader: LedgerReader, start: float, end: float | None) -> float:
    """The last thing on record of a process that was killed, before the next one started."""
    before = 1e300 if end is None else end
    queries = (
        "SELECT max(recorded_at) FROM batches WHERE recorded_at < ?",
        "SELECT max(committed_at) FROM batches WHERE committed_at < ?",
        "SELECT max(evaluated_at) FROM evaluations WHERE evaluated_at < ?",
    )
    return max(start, *(reader.rows(query, (before,))[0][0] or 0.0 for query in queries))


def _plain_account(account: Any) -> dict[str, int]:
    return {name: getattr(account, name) for name in ("dispatched", *_ENDINGS, "pending")}


def _total(table: MetricsTable, key: str) -> float | None:
    values = [value for value in table.columns.get(key, ()) if not math.isnan(value)]
    return sum(values) if values else None


def _described(key: str) -> dict[str, str]:
    metric = find(key)
    section = next((name for name, metrics in SECTIONS.items() if metric in metrics), "Your own")
    return {
        "key": key,
        "section": section,
        "unit": metric.unit if metric else "",
        "meaning": metric.meaning if metric else "",
    }


def metrics_page(view: RunView, keys: list[str], after: int, points: int) -> dict[str, Any]:
    """Curves: steps, the seconds since the start at which they were made, and a value or null per step and key."""
    with view.metrics() as table:
        for key in keys:
            if key not in table.columns and find(key) is None:
                raise ConfigError(f'the run has no metric "{key[:80]}"{nearest(key, table.columns)}')
        steps, series = table.series(keys or sorted(table.columns), after, min(points, _MOST_POINTS))
    return {"steps": steps, "seconds": _seconds(view, steps), "series": series}


def _seconds(view: RunView, steps: list[int]) -> list[float | None]:
    """Since the first start of the run. Pauses between processes are time, too."""
    try:
        with view.ledger() as reader:
            start = reader.rows("SELECT min(started_at) FROM processes")[0][0]
            rows = reader.rows(
                "SELECT step + coalesce(steps, 1), committed_at FROM batches WHERE step >= ? AND step <= ?",
                (min(steps, default=0) - 1, max(steps, default=0)),
            )
    except (LedgerError, Missing):
        return [None] * len(steps)
    when = {step: at for step, at in rows if at is not None}
    return [round(when[step] - start, 3) if start and step in when else (0.0 if step == 0 else None) for step in steps]


def account_page(view: RunView, points: int = 400) -> dict[str, Any]:
    """How episodes ended, up to and including each step."""
    with view.ledger() as reader:
        sums = ", ".join(f"sum({ending})" for ending in _ENDINGS)
        rows = reader.rows(f"SELECT step + 1, {sums} FROM groups WHERE step IS NOT NULL GROUP BY step ORDER BY step")
        account = reader.account()
    totals, upto = [0] * len(_ENDINGS), []
    for step, *ended in rows:
        totals = [before + now for before, now in zip(totals, ended, strict=True)]
        upto.append((step, *totals))
    kept = [upto[place] for place in thinned(range(len(upto)), points)]
    columns = list(zip(*kept, strict=True)) if kept else [()] * (1 + len(_ENDINGS))
    return {
        "steps": list(columns[0]),
        **{ending: list(column) for ending, column in zip(_ENDINGS, columns[1:], strict=True)},
        "now": _plain_account(account),
    }
