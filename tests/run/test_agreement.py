"""Ledgers and checkpoints that do not belong together: an older copy, a cut log, another run's.

One run is made, and its folder is copied at the end of every step, as a kill at that moment would leave it.
"""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from crash_checks import check_account, rows
from headrace.cli.main import run as run_command
from headrace.errors import ConfigError, HeadraceError, LedgerError
from headrace.ledger import LedgerReader
from headrace.run.agreement import first_gap, in_words
from headrace.run.checkpoint import list_checkpoints
from headrace.trainer.callbacks import Callback, TrainerHandle
from headrace.trainer.replay import Replay
from null_backend import Null, null_trainer, scattered

STEPS, KILLED, NEWEST, BEFORE = 9, 7, 6, 4  # the run is killed in its 8th step; its last two checkpoints
SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "ahead": {"max_staleness": 2, "placement": "separate", "staleness": "wait"},
    "two_updates": {"updates_per_batch": 2, "steps": 2 * STEPS, "save_every": 4},
}


async def other_rewards(task: Any, model: Any) -> float:
    reply = await model.chat(task.messages)
    return float(sum(reply.completion_ids) % 7)


def trainer_of(
    folder: Path, schedule: str, callbacks: Any = (), seed: int = 0, workflow: Any = scattered, **sections: Any
) -> tuple[Any, Null]:
    null = Null()
    loop = {"steps": STEPS, "batch_size": 3, "save_every": 2, "keep_last": 9, "save_async": False}
    given = {
        "run": {"dir": str(folder), "name": "r", "seed": seed, "deterministic": True},
        "ledger": {"enabled": True},
        "trainer": {**loop, **SCHEDULES[schedule]},
        "filters": {"drop_uniform": True},
        **sections,
    }
    return null_trainer(folder, workflow, null=null, callbacks=callbacks, **given), null


class Copying(Callback):
    """Copies the run folder at the end of every batch, when the ledger has it."""

    def __init__(self, into: Path) -> None:
        self._into = into
        self.batches = 0

    def on_train_start(self, trainer: TrainerHandle) -> None:
        self._trainer: Any = trainer

    def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.batches += 1
        self._trainer._run.journal._ledger._writer.wait(sync=False)
        shutil.copytree(self._trainer._run.folder, self._into / str(self.batches) / "r")


@pytest.fixture(scope="module", params=list(SCHEDULES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A schedule, and the folder with its finished run and the copies."""
    place = tmp_path_factory.mktemp(request.param)
    trainer_of(place, request.param, [Copying(place)])[0].fit()
    return request.param, place


def ledger_files(folder: Path) -> list[Path]:
    return list((folder / "r").glob("ledger.sqlite*"))


def put_ledger(source: Path, target: Path) -> None:
    """In place of the one that is there."""
    for path in ledger_files(target):
        path.unlink()
    for path in ledger_files(source):
        shutil.copy(path, target / "r" / path.name)


def batches(folder: Path) -> dict[int, set[int]]:
    """Step to the groups of its batch."""
    found: dict[int, set[int]] = {}
    for step, group_id in rows(folder / "r", "SELECT step, group_id FROM batch_groups WHERE again = 0"):
        found.setdefault(step, set()).add(group_id)
    return found


def resume_and_check(schedule: str, folder: Path, whole: Path) -> str:
    """Train to the end; what was logged. No group is trained that is in the checkpoint, and none twice."""
    saved = int(list_checkpoints(folder / "r")[-1].name.removeprefix("step_"))
    contained = {group for step, groups in batches(whole).items() if step < saved for group in groups}
    trainer, null = trainer_of(folder, schedule)
    trainer.fit()
    per = SCHEDULES[schedule].get("updates_per_batch", 1)
    trained = [{row.group_id for row in samples} for _, samples in null.made[-1].steps]
    trained = [set().union(*trained[at : at + per]) for at in range(0, len(trained), per)]
    assert not contained & set().union(*trained), "a group of the checkpoint was trained again"
    assert sum(map(len, trained)) == len(set().union(*trained)), "a group was trained twice"
    if schedule != "ahead":
        assert trained == [groups for step, groups in sorted(batches(whole).items()) if step >= saved]
    check_account(folder / "r")
    return (folder / "r" / "log.txt").read_text()


def copied(made: tuple[str, Path], tmp_path: Path, batch: int = KILLED) -> tuple[str, Path, Path]:
    schedule, place = made
    shutil.copytree(place / str(batch) / "r", tmp_path / "r")
    (tmp_path / "r" / "log.txt").write_text("")
    return schedule, tmp_path, place


@pytest.mark.parametrize("percent", range(0, 101, 5))
def test_a_log_that_is_cut_costs_nothing_that_the_checkpoint_contains(
    made: tuple[str, Path], tmp_path: Path, percent: int
) -> None:
    schedule, folder, whole = copied(made, tmp_path)
    log = folder / "r" / "ledger.sqlite-wal"
    size = log.stat().st_size
    assert size > 4096
    with log.open("r+b") as file:
        file.truncate(size * percent // 100)
    (folder / "r" / "ledger.sqlite-shm").unlink(missing_ok=True)
    said = resume_and_check(schedule, folder, whole)
    assert "warning" not in said  # everything since the checkpoint is made again, or from the record
    assert batches(folder).keys() == batches(whole).keys()


@pytest.mark.parametrize("batch", range(1, KILLED))
def test_an_older_ledger_is_restored_as_far_as_the_checkpoint_reaches_and_else_refused(
    made: tuple[str, Path], tmp_path: Path, batch: int
) -> None:
    schedule, folder, whole = copied(made, tmp_path)
    put_ledger(whole / str(batch), folder)
    known = batches(folder)
    if batch < BEFORE:
        with pytest.raises(LedgerError, match=r"behind the checkpoint of step \d+: it has \d of .* move ledger.sqlite"):
            resume_and_check(schedule, folder, whole)
        assert batches(folder) == known  # it is left as it was
        return
    said = resume_and_check(schedule, folder, whole)
    if batch < NEWEST:
        assert "the ledger was behind the checkpoint" in said and "their messages are lost" in said
    assert batches(folder).keys() == batches(whole).keys()
    with LedgerReader.read(folder / "r") as ledger:
        assert [record.steps for record in ledger.batches_from(0)]
        lost = [step for step in batches(whole) if step not in known and step < NEWEST]
        for step in lost if schedule == "synchronous" else ():  # ahead, the older one may have had them
            with pytest.raises(LedgerError, match=r"are no longer in|has \d of the \d episodes"):
                ledger.complete_group(min(batches(whole)[step]))


def test_without_its_ledger_the_run_resumes_and_says_so_once(made: tuple[str, Path], tmp_path: Path) -> None:
    schedule, folder, whole = copied(made, tmp_path)
    for path in ledger_files(folder):
        path.unlink()
    said = resume_and_check(schedule, folder, whole)
    assert said.count("there is no ledger of steps 1 to") == 1


Damage = Callable[[Path, Path], None]


def others_ledger(folder: Path, other: Path) -> None:
    put_ledger(other, folder)


def others_checkpoint(folder: Path, other: Path) -> None:
    newest = list_checkpoints(folder / "r")[-1]
    shutil.rmtree(newest)
    shutil.copytree(other / "r" / "checkpoints" / newest.name, newest)


@pytest.mark.parametrize("damage", [others_ledger, others_checkpoint])
def test_what_belongs_to_another_run_is_refused(made: tuple[str, Path], tmp_path: Path, damage: Damage) -> None:
    schedule, folder, _ = copied(made, tmp_path)
    trainer_of(tmp_path / "other", schedule, seed=5)[0].fit()
    damage(folder, tmp_path / "other")
    with pytest.raises(LedgerError, match=r"one of them is another run's\. Put the run's own back; or move"):
        trainer_of(folder, schedule)[0].fit()


def test_a_ledger_that_went_on_elsewhere_is_refused(made: tuple[str, Path], tmp_path: Path) -> None:
    """A copy of the run that was resumed by itself has the same identity, and other batches."""
    schedule, folder, whole = copied(made, tmp_path)
    if schedule == "ahead":  # here, by chance, it makes the same batches
        return
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(whole / str(BEFORE + 1) / "r", elsewhere / "r")
    trainer_of(elsewhere, schedule, workflow=other_rewards)[0].fit()
    put_ledger(elsewhere, folder)
    with pytest.raises(LedgerError, match="contradicts the checkpoint of step"):
        trainer_of(folder, schedule)[0].fit()


def test_a_checkpoint_that_is_older_than_the_ledger_is_the_usual_case(made: tuple[str, Path], tmp_path: Path) -> None:
    schedule, folder, whole = copied(made, tmp_path)
    shutil.rmtree(list_checkpoints(folder / "r")[-1])
    assert "warning" not in resume_and_check(schedule, folder, whole)


def test_a_gap_in_the_record_after_the_checkpoint_is_refused(made: tuple[str, Path], tmp_path: Path) -> None:
    schedule, folder, _ = copied(made, tmp_path)
    for checkpoint in list_checkpoints(folder / "r"):
        shutil.rmtree(checkpoint)
    with sqlite3.connect(folder / "r" / "ledger.sqlite") as connection:
        connection.execute("DELETE FROM batches WHERE step = 2")
    with pytest.raises(LedgerError, match=r"but not that of step 3, and the newest intact checkpoint is of step 0"):
        trainer_of(folder, schedule)[0].fit()


def test_steps_without_a_ledger_are_not_taken_for_recorded_ones(tmp_path: Path) -> None:
    class StopAt(Callback):
        def __init__(self, step: int) -> None:
            self._at = step

        def on_train_start(self, trainer: TrainerHandle) -> None:
            self._trainer = trainer

        def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == self._at:
                self._trainer.stop()

    trainer_of(tmp_path, "ahead", [StopAt(3)])[0].fit()
    trainer_of(tmp_path, "ahead", [StopAt(5)], ledger={"enabled": False})[0].fit()
    with pytest.raises(LedgerError, match=r"ends at step 3, and the checkpoint is of step 5: .*ledger.enabled = false"):
        trainer_of(tmp_path, "ahead")[0].fit()
    trainer_of(tmp_path, "ahead", ledger={"enabled": False})[0].fit()


# ---- damage ----------------------------------------------------------------------------------------------------------

LAST = "(SELECT max(step) FROM batches)"
OF_LAST = f"(SELECT min(group_id) FROM batch_groups WHERE step = {LAST})"
CALL = f"call_id = (SELECT min(call_id) FROM calls JOIN episodes USING (episode_id) WHERE group_id = {OF_LAST})"
UNTRAIN = "UPDATE groups SET state = '{0}', trained = 0, stale = {1} WHERE group_id = " + OF_LAST
UNCOUNT = f"UPDATE counts SET episodes = episodes - (SELECT trained FROM groups WHERE group_id = {OF_LAST}) "
DAMAGES: dict[str, tuple[list[str], str]] = {
    "a group is not listed": ([f"DELETE FROM batch_groups WHERE step = {LAST} AND place = 1"], "3 groups, and 2 are"),
    "nor in an old batch": (["DELETE FROM batch_groups WHERE step = 0 AND place = 1"], "3 groups, and 2 are listed"),
    "no group is listed": ([f"DELETE FROM batch_groups WHERE step = {LAST}"], "and 0 are listed"),
    "a batch has another group": (
        [f"UPDATE batch_groups SET group_id = 999 WHERE step = {LAST} AND place = 1"],
        "group 999 was trained in the batch of step .*, and is not recorded",
    ),
    "two batches have a group": (
        [f"UPDATE batch_groups SET group_id = (SELECT group_id FROM batch_groups WHERE step = 0 AND place = 0) "
         f"WHERE step = {LAST} AND place = 1"],
        "is new in the batches of step 1 and of step|contradicts",
    ),
    "a batch has another version": ([f"UPDATE batches SET version = 99 WHERE step = {LAST}"], "its checksum differs"),
    "a batch has other pieces": ([f"UPDATE batches SET pieces = '[2' WHERE step = {LAST}"], "pieces of the batch"),
    "a trained group is complete": (
        [f"UPDATE groups SET state = 'whole' WHERE group_id = {OF_LAST}"], 'is "whole", and of its 2 episodes',
    ),
    "without its episodes": ([UNTRAIN.format("whole", 0)], "counted as trained, and its groups have"),
    "nor counted": (
        [UNCOUNT + "WHERE ending = 'trained'", UNTRAIN.format("whole", 0)], 'was trained in the batch .* is "whole"',
    ),
    "a trained group is stale": ([UNTRAIN.format("stale", "trained")], "counted as stale, and its groups have 2"),
    "a trained group is unknown": ([f"DELETE FROM groups WHERE group_id = {OF_LAST}"], "counted as dispatched|behind"),
    "a state is not one": (
        [f"UPDATE groups SET state = 'trainee' WHERE group_id = {OF_LAST}"], '"trainee"|contradicts|behind',
    ),
    "an episode is missing": (
        [f"DELETE FROM episodes WHERE group_id = {OF_LAST} AND rollout_idx = 0"], "it has 1 of the 2 episodes of group",
    ),
    "a bit of a call": (
        [f"UPDATE calls SET body = CAST(substr(body, 1, 30) || x'7f' || substr(body, 32) AS BLOB) WHERE {CALL}"],
        r"model call 0 of group \d+: its checksum differs",
    ),
    "how a call ended": ([f"UPDATE calls SET finish_reason = 'length' WHERE {CALL}"], "its checksum differs"),
    "no body": ([f"UPDATE calls SET body = 'text' WHERE {CALL}"], "it is not a body"),
    "the first prompt": ([f"DELETE FROM prompts WHERE group_id = {OF_LAST}"], "the first prompt is missing"),
    "text that is none": (["UPDATE groups SET source = CAST(x'ff' AS TEXT) WHERE group_id = 0"], "UTF-8|contradicts"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_edited_ledger_is_refused_with_what_was_found_and_what_to_do(
    made: tuple[str, Path], tmp_path: Path, damage: str
) -> None:
    """What was recorded last is trained again from the record: none of it may be taken as it is."""
    schedule, folder, whole = copied(made, tmp_path)
    statements, found = DAMAGES[damage]
    with sqlite3.connect(folder / "r" / "ledger.sqlite") as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            assert connection.execute(statement).rowcount > 0
    with pytest.raises(LedgerError, match=found) as refused:
        trainer_of(folder, schedule)[0].fit()
    assert "ledger.sqlite " in str(refused.value) and "\n" not in str(refused.value)
    assert "back; or move ledger.sqlite and ledger.sqlite-wal away" in str(refused.value)
    for path in ledger_files(folder):  # the remedy is one
        path.unlink()
    resume_and_check(schedule, folder, whole)


def test_without_ledger_and_checkpoint_a_run_starts_again(made: tuple[str, Path], tmp_path: Path) -> None:
    schedule, folder, _ = copied(made, tmp_path)
    for path in ledger_files(folder):
        path.unlink()
    shutil.rmtree(folder / "r" / "checkpoints")
    trainer, null = trainer_of(folder, schedule)
    trainer.fit()
    assert len(null.made[-1].steps) == SCHEDULES[schedule].get("steps", STEPS)


def test_random_damage_is_refused_or_does_not_matter(made: tuple[str, Path], tmp_path: Path) -> None:
    schedule, _, whole = copied(made, tmp_path / "copy")
    rng, outcomes = random.Random(schedule), set()
    for number in range(8):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "copy" / "r", folder / "r")
        path = folder / "r" / "ledger.sqlite"
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        content = bytearray(path.read_bytes())
        words = [found.start() for found in re.finditer(b"trained|finished|dispatched|default", content)]
        place = rng.choice(words) + rng.randrange(-8, 8) if number % 2 else rng.randrange(100, len(content))
        content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            resume_and_check(schedule, folder, whole)
            outcomes.add("trained")
        except HeadraceError:  # mostly LedgerError; or a task that the run does not have
            outcomes.add("refused")
    assert outcomes == {"trained", "refused"} or schedule == "ahead"  # whose file is another one each time


# ---- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "says"),
    [(range(1, 20), None), ([1, 2, 5, 6, 7], "3-4"), ([], "1-6"), ([1, 3, 5, 6], "2, 4")],
    ids=["all", "some", "none", "every other"],
)
def test_steps_missing_from_the_metrics_are_named(
    made: tuple[str, Path], tmp_path: Path, kept: Any, says: str | None
) -> None:
    schedule, folder, _ = copied(made, tmp_path)
    if schedule == "two_updates":
        return
    path = folder / "r" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for number, line in enumerate(lines, 1) if number in kept))
    trainer_of(folder, schedule)[0].fit()
    said = (folder / "r" / "log.txt").read_text()
    expected = f"metrics.jsonl has no row of steps {says}, which the checkpoint contains"
    assert expected in said if says else "has no row" not in said


def test_a_replay_refuses_a_gap_and_reports_what_is_missing_at_the_end(
    made: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, folder, whole = copied(made, tmp_path)
    put_ledger(whole / "3", folder)
    notes = Replay(folder / "r").notes
    assert len(notes) == 1 and "the ledger ends at step" in notes[0]
    with sqlite3.connect(folder / "r" / "ledger.sqlite") as connection:
        connection.execute("DELETE FROM batches WHERE step = 1")
    if schedule != "two_updates":
        assert run_command(["replay", str(folder / "r")]) == 2
        assert "has no batch of step 2" in capsys.readouterr().err


@pytest.mark.parametrize("until", [0, -1, 99])
def test_a_replay_of_steps_that_are_not_recorded_is_refused(made: tuple[str, Path], until: int) -> None:
    with pytest.raises(ConfigError, match=rf"--until {until} is not a recorded step of .* has steps 1 to \d+; give"):
        Replay(made[1] / "r", until)


def test_numbers_in_words_and_gaps() -> None:
    assert in_words([7, 1, 2, 3, 9]) == "1-3, 7, 9" and in_words([]) == ""
    assert first_gap([(0, 2), (2, 1), (3, None)], 0) is None
    assert (
        first_gap([(0, 2), (3, 1)], 0) == 2 and first_gap([(1, 1)], 0) == 0 and first_gap([(0, None), (1, 1)], 0) == 0
    )
