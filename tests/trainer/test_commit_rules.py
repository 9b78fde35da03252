"""What must be on disk before the next thing is done. Each rule is shown by holding back what it waits for.

A held writer holds the ledger's thread at an event, with everything before it committed. The run then goes as far as it
may; what it did meanwhile is looked at before the writer is let go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.ledger import LedgerReader
from headrace.ledger.recorder import Recorder
from headrace.ledger.writer import Event, Writer
from headrace.run.checkpoint_writer import CheckpointWriter
from headrace.run.ledger_journal import LedgerJournal
from headrace.tracking.base import TrackerSet
from headrace.trainer import trainer as trainer_module
from null_backend import Null, NullBackend, null_config, null_trainer

HELD_S = 0.4  # much longer than the run takes for what it must not do
SECTIONS: dict[str, Any] = {
    "ledger": {"enabled": True},
    "trainer": {"steps": 3, "batch_size": 3, "save_every": 1, "keep_last": 9},
}
AHEAD: dict[str, Any] = {"trainer": {**SECTIONS["trainer"], "max_staleness": 2, "placement": "separate"}}


class Held:
    """Holds the ledger's thread back before it writes what `is_it` says, until it is let go."""

    def __init__(self, is_it: Callable[[list[Event], bool], bool], monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._go, self._is_it = threading.Event(), threading.Event(), is_it
        self._write = Writer._write
        held = self

        def write(self: Writer, events: list[Event], sync: bool) -> None:
            if held._is_it(events, sync) and not held._go.is_set():
                held.reached.set()
                assert held._go.wait(60)
            held._write(self, events, sync)

        monkeypatch.setattr(Writer, "_write", write)

    @contextmanager
    def holding(self, run: Callable[[], Any]) -> Iterator[None]:
        """While a run is held back; it goes on to its end afterwards."""
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(run)
            try:
                assert self.reached.wait(60)
                time.sleep(HELD_S)
                yield
            finally:
                self._go.set()
            result.result(60)


def has(event: Any) -> Callable[[list[Event], bool], bool]:
    return lambda events, sync: any(method is event for method, _ in events)


@pytest.mark.parametrize("sections", [SECTIONS, SECTIONS | AHEAD], ids=["synchronous", "ahead"])
def test_no_update_is_made_before_its_batch_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    null = Null()
    trainer = null_trainer(tmp_path, null=null, **sections)
    with Held(has(Recorder.batch), monkeypatch).holding(trainer.fit):
        (backend,) = null.made
        assert backend.forwards > 0  # it has come so far
        assert backend.weights == 0.0 and not backend.steps and backend.synced == [0]
    assert backend.weights == 3.0


class Looking(NullBackend):
    """Looks with a connection of its own whether the batch is in the file, with what was decided, before it updates."""

    async def optim_step(self, lr: float, grad_scale: float) -> Any:
        with LedgerReader.read(self.null.run_dir) as ledger:  # type: ignore[attr-defined]
            record = ledger.batch_record(int(self.weights))
            assert record is not None and record.steps is None, f"the batch of step {self.weights} is not recorded"
            groups = [ledger.group_record(group_id) for group_id in record.group_ids]
            assert {group and group.state for group in groups} == {"trained"}
            assert ledger.trained_rows(record.step)
        return await super().optim_step(lr, grad_scale)


class LookingNull(Null):
    run_dir: Path

    def __call__(self, config: Any) -> NullBackend:
        self.run_dir = config.run.dir / config.run.name
        self.made.append(Looking(config, self))
        return self.made[-1]


@pytest.mark.parametrize("sections", [SECTIONS, SECTIONS | AHEAD], ids=["synchronous", "ahead"])
def test_at_its_update_a_batch_its_rows_and_decisions_are_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    slowly = Writer._write

    def write(self: Writer, events: list[Event], sync: bool) -> None:
        time.sleep(0.05)  # without the rule, the update would be made meanwhile
        slowly(self, events, sync)

    monkeypatch.setattr(Writer, "_write", write)
    null_trainer(tmp_path, null=LookingNull(), **sections).fit()


def test_no_checkpoint_is_begun_before_the_ledger_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[int] = []
    save = CheckpointWriter.save
    monkeypatch.setattr(
        CheckpointWriter, "save", lambda self, state, *args: saves.append(state.step) or save(self, state, *args)
    )
    trainer = null_trainer(tmp_path, **SECTIONS)
    with Held(lambda events, sync: sync, monkeypatch).holding(trainer.fit):
        assert saves == []
        assert not (tmp_path / null_config(tmp_path).run.name / "checkpoints").exists()
    assert saves == [1, 2, 3]


def test_syncing_is_a_full_sync_of_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SQLite does at a commit is up to a setting, so that setting is looked at when it commits."""
    seen: list[tuple[bool, int]] = []
    before_commit = Recorder.before_commit

    def look(self: Recorder) -> None:
        before_commit(self)
        seen.append((syncing[-1], self._execute("PRAGMA synchronous").fetchone()[0]))

    syncing: list[bool] = []
    write = Writer._write
    monkeypatch.setattr(Recorder, "before_commit", look)
    monkeypatch.setattr(Writer, "_write", lambda self, events, sync: syncing.append(sync) or write(self, events, sync))
    null_trainer(tmp_path, **SECTIONS).fit()
    assert {full for sync, full in seen if sync} == {2} and {full for sync, full in seen if not sync} == {1}


def test_a_step_is_tracked_before_it_is_saved_and_old_checkpoints_go_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kw: order.append(what) or original(*args, **kw))

    noted(TrackerSet, "log", "tracked")
    noted(LedgerJournal, "flushed", "synced")
    noted(CheckpointWriter, "save", "saved")
    noted(CheckpointWriter, "_delete_all_but", "old deleted")
    noted(trainer_module, "mark_finished", "finished")
    trainer = {**SECTIONS["trainer"], "save_async": False}
    null_trainer(tmp_path, ledger=SECTIONS["ledger"], trainer=trainer).fit()
    assert order == ["tracked", "synced", "saved", "old deleted"] * 3 + ["finished"]


def test_a_run_is_finished_only_when_its_ledger_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = null_trainer(tmp_path, **SECTIONS)
    finished = tmp_path / null_config(tmp_path).run.name / "finished"
    with Held(has(Recorder.process_ended), monkeypatch).holding(trainer.fit):
        assert not finished.exists()
    assert finished.exists()


def test_a_held_batch_is_lost_completely_if_the_run_is_killed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process sees while the writer is held: no batch, no decision, no update."""
    trainer = null_trainer(tmp_path, **SECTIONS)
    with (
        Held(has(Recorder.batch), monkeypatch).holding(trainer.fit),
        LedgerReader.read(tmp_path / null_config(tmp_path).run.name) as ledger,
    ):
        assert ledger.last_batch() is None and ledger.account().trained == 0
