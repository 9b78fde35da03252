"""The run directory and its checkpoints, whatever is interrupted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import TrainerState, checkpoint_folder, list_checkpoints, load_checkpoint, save_checkpoint
from headrace.config import RunConfig
from headrace.errors import BackendError, ConfigError
from headrace.rundir import log_to_file, mark_finished, prepare_run_dir
from headrace.runfile import build_config


def config(tmp_path: Path) -> RunConfig:
    return build_config({"run": {"dir": str(tmp_path), "name": "try"}})


def state(step: int) -> TrainerState:
    return TrainerState(step, step, (1, 4), 12, {"eval/words/pass@1": 0.25})


class FileBackend:
    """Keeps one number in a file; `dies` while saving, after the file is begun."""

    def __init__(self, weights: int = 0, dies: bool = False) -> None:
        self.weights = weights
        self.dies = dies

    async def save(self, folder: Path) -> None:
        self._write(folder)
        if self.dies:
            raise KeyboardInterrupt

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.weights))

    async def load(self, folder: Path) -> None:
        self.weights = int((folder / "weights").read_text())


async def save(run_dir: Path, step: int, keep_last: int = 2, dies: bool = False) -> Path:
    backend: Any = FileBackend(weights=step, dies=dies)
    return await save_checkpoint(run_dir, state(step), backend, keep_last)


# ---- folder ----------------------------------------------------------------------------------------------------------


def test_an_unfinished_run_is_gone_on_with_and_a_finished_one_left_alone(tmp_path: Path) -> None:
    first = prepare_run_dir(config(tmp_path))
    assert prepare_run_dir(config(tmp_path)) == first == tmp_path / "try"
    mark_finished(first, {"eval/words/pass@1": 0.5})
    second = prepare_run_dir(config(tmp_path))
    mark_finished(second, {})
    assert [second.name, prepare_run_dir(config(tmp_path)).name] == ["try-2", "try-3"]


def test_the_written_configuration_gives_the_same_run_again(tmp_path: Path) -> None:
    folder = prepare_run_dir(config(tmp_path))
    assert build_config(json.loads((folder / "config.json").read_text())) == config(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "try").write_text("a file is in the way")
    with pytest.raises(ConfigError, match=r"cannot write the run folder .*; choose another with --run-dir"):
        prepare_run_dir(config(tmp_path))


def test_each_run_has_a_log_of_its_own(tmp_path: Path) -> None:
    logger = logging.getLogger("headrace")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        handler = log_to_file(tmp_path / name)
        logger.info("hello from %s", name)
        handler.close()
    for name in ("one", "two"):
        (line,) = (tmp_path / name / "log.txt").read_text().splitlines()
        assert line.endswith(f"INFO hello from {name}")


def test_a_closed_log_leaves_the_logger_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("headrace")
    before = (logger.level, logger.propagate, list(logger.handlers))
    handler = log_to_file(tmp_path)
    assert (logger.level, logger.propagate) == (logging.INFO, False)
    handler.close()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    logger.setLevel(logging.ERROR)
    handler.close()  # as at exit, once more
    assert logger.level == logging.ERROR
    logger.setLevel(before[0])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


async def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path) -> None:
    folder = await save(tmp_path, 20)
    assert folder == checkpoint_folder(tmp_path, 20) == tmp_path / "checkpoints" / "step_000020"
    backend: Any = FileBackend()
    assert await load_checkpoint(folder, backend) == state(20)
    assert backend.weights == 20


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        await save(tmp_path, step, keep_last=2)
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, step) for step in (15, 20)]


async def test_checkpoints_stand_in_the_order_of_their_steps_however_many_digits(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        await save(tmp_path, step)
    (tmp_path / "checkpoints" / "step_old").mkdir()
    (tmp_path / "checkpoints" / "step_old" / "trainer.json").touch()
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, step) for step in (999_999, 1_000_000)]
    await save(tmp_path, 1_000_001, keep_last=1)
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, 1_000_001)]


async def test_dying_while_saving_leaves_the_one_before_and_can_be_done_again(tmp_path: Path) -> None:
    await save(tmp_path, 5)
    with pytest.raises(KeyboardInterrupt):
        await save(tmp_path, 10, dies=True)
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, 5)]
    await save(tmp_path, 10)
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, step) for step in (5, 10)]


async def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    await save(tmp_path, 5)
    (checkpoint_folder(tmp_path, 5) / "left over").touch()
    await save(tmp_path, 5)
    assert sorted(p.name for p in checkpoint_folder(tmp_path, 5).iterdir()) == ["trainer.json", "weights"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 5}', '{"sampler_position": [0, 0], "surprise": 1}'])
async def test_a_damaged_checkpoint_is_an_error_with_a_remedy(tmp_path: Path, content: str) -> None:
    folder = await save(tmp_path, 5)
    (folder / "trainer.json").write_text(content)
    backend: Any = FileBackend()
    with pytest.raises(BackendError, match=r"cannot read the checkpoint .*; choose another one"):
        await load_checkpoint(folder, backend)
    assert backend.weights == 0
