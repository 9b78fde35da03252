"""Saving, whatever happens meanwhile: kills, full disks, and training that goes on."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoint_data import FileBackend, SnapshotBackend, save_one, score, some_config, some_state, writer
from headrace.config.loading import build_config
from headrace.errors import CheckpointError, ConfigError, SnapshotLostError
from headrace.run.checkpoint import checkpoint_folder, list_checkpoints, load_newest, step_of
from headrace.run.checkpoint_writer import adopt, steps_to_keep, tidy
from headrace.run.manifest import find_damage

MB = 1 << 20


def steps(run_dir: Path) -> list[int]:
    assert all(find_damage(folder) is None for folder in list_checkpoints(run_dir))
    return [step_of(folder) for folder in list_checkpoints(run_dir)]


# ---- which are kept --------------------------------------------------------------------------------------------------


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        await save_one(tmp_path, step, keep_last=2)
    assert steps(tmp_path) == [15, 20]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000015", "step_000020"]


async def test_the_best_are_kept_beside_the_last(tmp_path: Path) -> None:
    history = []
    for step, value in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.7), (5, 0.1), (6, 0.3)):
        history.append(score(step, value))
        state = some_state(step, evaluations=list(history))
        await save_one(tmp_path, step, state=state, keep_last=1, keep_best=2, save_every=1)
    assert steps(tmp_path) == [2, 4, 6]


def test_of_equally_good_ones_the_later_is_kept_and_one_without_a_score_is_never_best() -> None:
    section = some_config(keep_last=1, keep_best=1, save_every=1).trainer
    assert steps_to_keep([1, 2, 3, 4], section, {1: 0.5, 2: 0.5}) == {2, 4}
    assert steps_to_keep([1, 2, 3, 4], section, {}) == {4}


async def test_a_checkpoint_whose_evaluation_still_runs_is_kept_until_it_is_known(tmp_path: Path) -> None:
    saving = writer(tmp_path, FileBackend(), keep_last=1, keep_best=1, save_every=1)
    await saving.save(some_state(1))
    await saving.save(some_state(2), undecided={1})
    await saving.wait()
    assert steps(tmp_path) == [1, 2]
    await saving.save(some_state(3, evaluations=[score(1, 0.9), score(2, 0.1)]))
    await saving.wait()
    assert steps(tmp_path) == [1, 3]
    await saving.close()


async def test_a_metric_that_no_evaluation_reports_is_an_error(tmp_path: Path) -> None:
    saving = writer(tmp_path, FileBackend(), keep_best=1, save_every=1, best_metric="eval/words/hard/pass@1")
    with pytest.raises(
        ConfigError, match=r'best_metric is "eval/words/hard/pass@1", which .* reported eval/words/pass@1'
    ):
        await saving.save(some_state(1, evaluations=[score(1, 0.5)]))
    await saving.close()


@pytest.mark.parametrize(
    ("trainer", "sections", "says"),
    [
        ({"best_metric": "eval/words/pass@1"}, {}, "has no effect: trainer.keep_best is 0"),
        ({"keep_best": 1, "save_every": 1}, {"sets": {}}, "there is no set"),
        ({"keep_best": 1, "save_every": 1}, {"sets": {"a": {"tasks": "countdown"}, "b": {"tasks": "countdown"}}},
         'set trainer.best_metric to one of "eval/a/pass@1", "eval/b/pass@1"'),
        ({"keep_best": 1, "save_every": 1, "best_metric": "eval/wrods/pass@1"}, {}, "of no evaluation set"),
        ({"keep_best": 1, "save_every": 1, "best_metric": "eval/words/pass@2"}, {}, "go by reward, pass@1, avg@1"),
        ({"keep_best": 1, "save_every": 1, "best_metric": "eval/words/failed"}, {}, "go by reward, pass@1, avg@1"),
        ({"keep_best": 1}, {}, "no step before the last is both saved and evaluated"),
        ({"keep_best": 1, "save_every": 1}, {"every": 0}, "no step before the last is both saved and evaluated"),
        ({"keep_best": 1, "save_every": 7, "steps": 60}, {"every": 9}, "one a multiple of the other"),
    ],
)  # fmt: skip
def test_nonsense_about_the_best_is_refused(trainer: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    evaluation = {"every": 1, "sets": {"words": {"tasks": "countdown"}}} | sections
    with pytest.raises(ConfigError, match=says):
        build_config({"trainer": trainer, "eval": evaluation})


# ---- beside training -------------------------------------------------------------------------------------------------


class SlowBackend(SnapshotBackend):
    """Its copy is written when it is allowed to."""

    def __init__(self, weights: int = 0) -> None:
        super().__init__(weights)
        self.go_on = threading.Event()

    def _write(self, folder: Path, weights: int) -> None:
        assert self.go_on.wait(10)
        super()._write(folder, weights)


async def test_training_continues_while_a_copy_is_written(tmp_path: Path) -> None:
    backend = SlowBackend(5)
    saving = writer(tmp_path, backend)
    await saving.save(some_state(5))
    backend.weights = 6  # the next optimizer step
    assert steps(tmp_path) == []
    backend.go_on.set()
    await saving.wait()
    assert steps(tmp_path) == [5]
    await backend.load(checkpoint_folder(tmp_path, 5))
    assert backend.weights == 5
    await saving.close()


async def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    backend = SlowBackend(5)
    saving = writer(tmp_path, backend)
    await saving.save(some_state(5))
    second = asyncio.create_task(saving.save(some_state(6)))
    await asyncio.sleep(0.02)
    assert not second.done()
    backend.go_on.set()
    await second
    assert 5 in steps(tmp_path)
    await saving.close()
    assert steps(tmp_path) == [5, 6]


async def test_closing_waits_and_cancelling_who_waits_cancels_nothing(tmp_path: Path) -> None:
    backend = SlowBackend(5)
    saving = writer(tmp_path, backend)
    await saving.save(some_state(5))
    waits = asyncio.create_task(saving.wait())
    await asyncio.sleep(0)
    waits.cancel()
    threading.Timer(0.05, backend.go_on.set).start()
    await saving.close()
    assert steps(tmp_path) == [5]


class LosesCopies(SnapshotBackend):
    """Whose processes die while they write."""

    def _write(self, folder: Path, weights: int) -> None:
        folder.mkdir()
        if weights == 6:
            raise SnapshotLostError("ranks were lost")
        folder.rmdir()
        super()._write(folder, weights)


async def test_a_copy_that_is_lost_leaves_its_checkpoint_out_and_the_one_before_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LosesCopies()
    saving = writer(tmp_path, backend, keep_last=1)
    for backend.weights in (5, 6):
        await saving.save(some_state(backend.weights))
        await saving.wait()
        assert steps(tmp_path) == [5]
    assert "step_000006 is left out: ranks were lost" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000005"]
    backend.weights = 7
    await saving.save(some_state(7))
    await saving.close()
    assert steps(tmp_path) == [7]


@pytest.mark.parametrize("given", [{"save_async": False}, {}])
async def test_what_is_not_saved_asynchronously_is_complete_on_return(tmp_path: Path, given: dict[str, Any]) -> None:
    saving = writer(tmp_path, SnapshotBackend(5), **given)
    await saving.save(some_state(5), last=not given)
    assert steps(tmp_path) == [5]
    await saving.close()


def test_asking_for_it_of_a_backend_that_cannot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save_async = true needs a backend with the method snapshot"):
        writer(tmp_path, FileBackend(), save_async=True)


async def test_a_state_is_saved_as_it_was_however_it_changes_later(tmp_path: Path) -> None:
    extra = {"ledger": {"commit": 1}}
    backend = SlowBackend(5)
    saving = writer(tmp_path, backend)
    await saving.save(some_state(5, extra=extra))
    extra["ledger"]["commit"] = 2
    backend.go_on.set()
    await saving.close()
    stored = json.loads((checkpoint_folder(tmp_path, 5) / "trainer.json").read_text())
    assert stored["extra"] == {"ledger": {"commit": 1}}


# ---- failures --------------------------------------------------------------------------------------------------------


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As on a disk that is nearly full: a file cannot grow beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", [FileBackend, SnapshotBackend])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
async def test_a_disk_that_fails_leaves_the_one_before_and_nothing_else(
    tmp_path: Path, number: int, kind: Callable[..., FileBackend]
) -> None:
    await save_one(tmp_path, 5)
    says = rf"cannot write the checkpoint .*step_000010: {os.strerror(number)}; step_000005 is intact"
    with pytest.raises(CheckpointError, match=says):
        await save_one(tmp_path, 10, kind(10, OSError(number, os.strerror(number))))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000005"]
    await save_one(tmp_path, 10)
    assert steps(tmp_path) == [5, 10]


@pytest.mark.parametrize("kind", [FileBackend, SnapshotBackend])
async def test_a_file_that_cannot_grow_is_a_clear_error(tmp_path: Path, kind: Callable[..., FileBackend]) -> None:
    await save_one(tmp_path, 5)
    with files_up_to(MB), pytest.raises(CheckpointError, match=r"File too large; step_000005 is intact"):
        await save_one(tmp_path, 10, kind(10, bytes_=2 * MB))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000005"]


async def test_a_failure_beside_training_is_raised_by_everyone_who_waits(tmp_path: Path) -> None:
    saving = writer(tmp_path, SnapshotBackend(5, OSError(errno.ENOSPC, "No space left on device")))
    await saving.save(some_state(5))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"there is none before it\. Make room"):
            await saving.wait()
    with pytest.raises(CheckpointError):
        await saving.save(some_state(6))
    await saving.close()


async def test_a_bug_in_a_backend_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        await save_one(tmp_path, 5, FileBackend(5, ZeroDivisionError()))
    assert not list((tmp_path / "checkpoints").iterdir())


TMPFS = """
import asyncio, sys
from pathlib import Path
from checkpoint_data import FileBackend, SnapshotBackend, save_one
from headrace.errors import CheckpointError
run = Path(sys.argv[1])
asyncio.run(save_one(run, 5))
for kind in (FileBackend, SnapshotBackend):
    try:
        asyncio.run(save_one(run, 10, kind(10, bytes_=4 << 20)))
    except CheckpointError as error:
        print(error)
print(sorted(path.name for path in (run / "checkpoints").iterdir()))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """On a file system of two megabytes, where one may be mounted."""
    mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    here = Path(__file__).parents[1]
    command = f"{mount} && exec {sys.executable} - {tmp_path}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], input=TMPFS, cwd=here, capture_output=True, text=True, check=True
    )
    first, second, left = done.stdout.splitlines()
    assert "No space left on device; step_000005 is intact" in first and first == second
    assert left == "['step_000005']"


# ---- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [10, 15])  # over the one of that step, or a new one, for which the oldest goes
@pytest.mark.parametrize("kind", ["FileBackend", "SnapshotBackend"])
def test_a_kill_before_any_operation_on_the_disk_leaves_a_complete_checkpoint(
    tmp_path: Path, step: int, kind: str
) -> None:
    """Each operation of a save in turn is where the process is killed; see kill_during_save.py."""
    script = Path(__file__).parents[1] / "kill_during_save.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), kind, str(step)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 15


async def test_what_a_kill_left_is_cleared_up(tmp_path: Path) -> None:
    folder = await save_one(tmp_path, 5)
    for name in (".step_000010.partial", ".step_000004.deleted", ".step_000005.replaced"):
        (folder.parent / name).mkdir()
    tidy(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["step_000005"]
    folder.rename(folder.with_name(".step_000005.replaced"))  # killed between the two renames
    tidy(tmp_path)
    assert steps(tmp_path) == [5]


async def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    await save_one(tmp_path, 5)
    (checkpoint_folder(tmp_path, 5) / "left over").touch()
    await save_one(tmp_path, 5)
    found = sorted(path.name for path in checkpoint_folder(tmp_path, 5).iterdir())
    assert found == ["checkpoint.json", "optimizer", "random.json", "trainer.json", "weights"]


# ---- from elsewhere --------------------------------------------------------------------------------------------------


async def test_an_adopted_checkpoint_outlives_the_one_it_comes_from(tmp_path: Path) -> None:
    for step in (5, 10):
        await save_one(tmp_path / "one", step)
    told: list[str] = []
    adopt(tmp_path / "two", tmp_path / "one", told.append)
    assert steps(tmp_path / "two") == [10] and "step_000010" in told[0]
    adopt(tmp_path / "two", tmp_path / "one" / "checkpoints" / "step_000005", told.append)
    assert steps(tmp_path / "two") == [10] and len(told) == 1  # it has one
    shutil.rmtree(tmp_path / "one")
    backend: Any = FileBackend()
    state = await load_newest(tmp_path / "two", backend)
    assert state is not None and (state.step, backend.weights) == (10, 10)


async def test_what_is_damaged_is_not_adopted(tmp_path: Path) -> None:
    for step in (5, 10):
        await save_one(tmp_path / "one", step)
    damaged = checkpoint_folder(tmp_path / "one", 10)
    (damaged / "weights").write_text("??")
    with pytest.raises(CheckpointError, match=r"step_000010 is damaged: weights"):
        adopt(tmp_path / "two", damaged)
    adopt(tmp_path / "two", tmp_path / "one")
    assert steps(tmp_path / "two") == [5]
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run folder"):
        adopt(tmp_path / "three", tmp_path)


async def test_a_checkpoint_is_adopted_from_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await save_one(tmp_path / "one", 5)

    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    adopt(tmp_path / "two", folder.rename(tmp_path / "copied"))
    assert steps(tmp_path / "two") == [5]
