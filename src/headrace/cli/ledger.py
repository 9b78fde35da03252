"""`headrace ledger`."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from headrace.ledger import Account, LedgerReader, ProcessRecord

_ENDINGS = ("dispatched", "trained", "filtered", "failed", "stale", "pending")


def ledger(
    run: Annotated[Path, Parameter(help="Run folder, or its ledger.sqlite.")],
    /,
    *,
    export: Annotated[
        Path | None, Parameter(help="Write the episodes to FILE.jsonl or FILE.parquet (needs the extra parquet).")
    ] = None,
    kind: Annotated[
        Literal["train", "eval"] | None, Parameter(help='Which episodes to export; "train" if empty.')
    ] = None,
    steps: Annotated[
        str | None, Parameter(help="Export only those decided in steps A to B, counted from 1: A:B, A: or :B.")
    ] = None,
) -> None:
    """Show what a run has recorded: where every episode is, processes, batches.

    The run may still be training. docs/ledger.md describes the file.
    """
    if export is None and (kind or steps):
        raise ConfigError(f"{'--kind' if kind else '--steps'} says what to export; add --export FILE.jsonl")
    bounds = _bounds(steps or ":", kind or "train")
    from headrace.ledger import LedgerReader

    with LedgerReader.read(run) as reader:
        if export is None:
            _show(reader)
            return
        from headrace.ledger.export import export_episodes

        count = export_episodes(reader, export, kind or "train", *bounds)
        print(f"wrote {count} episodes to {export}")


def _bounds(steps: str, kind: str) -> tuple[int, int | None]:
    """As the ledger counts: trained after so many steps, evaluated after so many; the end is not included."""
    first, colon, end = steps.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, end)):
        raise ConfigError(f'--steps is A:B, A: or :B, with numbers of steps, got "{steps}"')
    if first and end and int(first) > int(end):
        raise ConfigError(f"--steps {steps} ends before it begins; give the smaller step first: {end}:{first}")
    made = int(kind == "train")  # a step is trained after those before it
    return max(int(first or 0) - made, 0), int(end) + 1 - made if end else None


def _show(reader: LedgerReader) -> None:
    from headrace.tracking.terminal import Console

    console = Console(highlight=False)
    with reader.snapshot():  # or the tables of a run that is training would show different moments
        console.print(_accounts(reader))
        console.print(_processes(reader.processes()))
        for line in _facts(reader):
            console.print(line, soft_wrap=True, markup=False)


def _accounts(reader: LedgerReader) -> Table:
    from rich.table import Table

    table = Table("episodes of", *_ENDINGS, title="dispatched = trained + filtered + failed + stale + pending")
    for column in table.columns[1:]:
        column.justify = "right"
    for source, account in reader.accounts().items():
        table.add_row(source, *_numbers(account))
    table.add_section()
    table.add_row("all", *_numbers(reader.account()))
    return table


def _numbers(account: Account) -> Iterator[str]:
    return (f"{getattr(account, name):,}" for name in _ENDINGS)


def _processes(found: list[ProcessRecord]) -> Table:
    from rich.table import Table

    table = Table("process", "started", "ended", "resumed from step")
    for process in found:
        resumed = "" if process.resumed_from is None else str(process.resumed_from)
        ended = _when(process.ended_at) if process.ended_at is not None else _fate(process, process is found[-1])
        table.add_row(f"{process.pid} on {process.host}", _when(process.started_at), ended, resumed)
    return table


def _fate(process: ProcessRecord, is_last: bool) -> str:
    """State of a process that recorded no end. A process on another machine cannot be checked from here."""
    if is_last and process.host != socket.gethostname():
        return "running, or killed"
    return "running" if is_last and _is_alive(process.pid) else "killed"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _facts(reader: LedgerReader) -> Iterator[str]:
    last = reader.last_batch()
    yield f"batches trained: {reader.batch_count():,}"
    if last is not None and last.steps is None:
        groups = f"the batch of step {last.step + 1}, {len(last.group_ids)} groups"
        yield f"recorded, but its update is not finished (a resumed run makes it again): {groups}"
    published = reader.last_weight_sync()
    if published is not None:
        yield f"last weight sync: version {published.version} after step {published.step}, {published.digest}"
    evaluations = reader.evaluations()
    if evaluations:
        yield f"evaluations: {len(evaluations):,}, the last of step {evaluations[-1].step}"
    if restarted := reader.restarted():
        yield f"attempts given up and started again: {restarted:,}"
    yield f"{reader.path}: {reader.size_bytes() / 1e6:,.1f} MB"
