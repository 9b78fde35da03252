"""What a checkpoint gives back, and how damage to one is noticed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint_data import FileBackend, save_one, score, some_state
from headrace.errors import BackendError, CheckpointError, ConfigError
from headrace.run.checkpoint import (
    checkpoint_folder,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    with_evaluation,
)
from headrace.run.manifest import NAME, find_damage, seal
from headrace.run.random_state import random_states, restore_random_states

FILES = ["weights", "optimizer/moments", "trainer.json", "random.json", NAME]


# ---- what is in it ---------------------------------------------------------------------------------------------------


async def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path) -> None:
    state = some_state(
        20,
        evaluations=[score(0, 0.25), score(10, 0.5)],
        unfinished=[(7, (0, 3)), (9, (1, 0))],
        random=random_states(),
        extra={"ledger": {"commit": 12}, "policy": [1.5, None]},
    )
    folder = await save_one(tmp_path, 20, state=state)
    assert folder == checkpoint_folder(tmp_path, 20) == tmp_path / "checkpoints" / "step_000020"
    backend = FileBackend()
    assert await load_checkpoint(folder, backend) == state  # type: ignore[arg-type]
    assert backend.weights == 20


def test_first_and_last_evaluation_are_found_in_the_history() -> None:
    history = with_evaluation([score(0, 0.1), score(10, 0.2)], score(20, 0.3))
    state = some_state(20, evaluations=with_evaluation(history, score(20, 0.4)))
    assert [found["eval/step"] for found in state.evaluations] == [0, 10, 20]
    assert state.first_evaluation == {"eval/words/pass@1": 0.1}
    assert state.last_evaluation == {"eval/words/pass@1": 0.4}
    assert some_state(20, evaluations=[score(10, 0.2)]).first_evaluation == {}
    assert some_state(20).last_evaluation == {}


def draw() -> list[float]:
    """Some of each; the odd number of normal draws leaves one in stock in `random` and in numpy."""
    legacy = np.random.normal(size=3)
    return [random.random(), random.gauss(0, 1), *legacy.tolist(), *torch.randn(5).tolist(), float(torch.rand(1))]


def test_random_states_are_restored_exactly() -> None:
    draw()
    kept = json.loads(json.dumps(random_states()))
    first = draw()
    assert draw() != first
    restore_random_states(kept)
    assert draw() == first


def test_random_states_that_say_nothing_change_nothing() -> None:
    before = random_states()
    restore_random_states({})
    assert random_states() == before


# ---- which there are -------------------------------------------------------------------------------------------------


async def test_checkpoints_stand_in_the_order_of_their_steps_however_many_digits(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        await save_one(tmp_path, step)
    (tmp_path / "checkpoints" / "step_old").mkdir()
    (tmp_path / "checkpoints" / "step_old" / NAME).touch()
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, step) for step in (999_999, 1_000_000)]
    await save_one(tmp_path, 1_000_001, keep_last=1)
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, 1_000_001)]


async def test_a_checkpoint_is_loaded_from_wherever_it_was_copied_to(tmp_path: Path) -> None:
    copied = (await save_one(tmp_path, 5)).rename(tmp_path / "the-good-one")
    backend = FileBackend()
    assert (await load_checkpoint(copied, backend)).step == 5  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run folder with one"):
        await load_checkpoint(tmp_path, backend)  # type: ignore[arg-type]


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)


async def newest(run_dir: Path, told: list[str]) -> tuple[int, int]:
    """(step, weights) of the newest whole one."""
    backend = FileBackend()
    state = await load_newest(run_dir, backend, told.append, set_aside=True)  # type: ignore[arg-type]
    assert state is not None
    return state.step, backend.weights


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("file", FILES)
async def test_a_flipped_bit_in_any_file_is_noticed_and_the_one_before_used(
    tmp_path: Path, file: str, place: int
) -> None:
    await save_one(tmp_path, 5)
    damaged = await save_one(tmp_path, 10)
    flip(damaged / file, place)
    with pytest.raises(CheckpointError, match=rf"step_000010 is damaged: {file} .*; choose another one"):
        await load_checkpoint(damaged, FileBackend())  # type: ignore[arg-type]
    told: list[str] = []
    assert await newest(tmp_path, told) == (5, 5)
    assert f"step_000010 is damaged: {file} " in told[0] and "skipped for the one before" in told[0]
    assert "resuming from" in told[1] and "step_000005" in told[1]
    assert "damaged_step_000010" in told[2]
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step_000005"]


async def test_the_bytes_of_the_manifest_all_count(tmp_path: Path) -> None:
    folder = await save_one(tmp_path, 5)
    whole = (folder / NAME).read_bytes()
    for place in range(0, len(whole) - 1, 3):  # but for the line feed at its end
        flip(folder / NAME, place)
        assert find_damage(folder), place
        (folder / NAME).write_bytes(whole)
    assert find_damage(folder) is None


@pytest.mark.parametrize("file", FILES)
async def test_a_missing_or_shortened_file_is_noticed(tmp_path: Path, file: str) -> None:
    folder = await save_one(tmp_path, 5)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:-2])
    assert file in (find_damage(folder) or "")
    (folder / file).unlink()
    assert file in (find_damage(folder) or "")
    (folder / file).write_bytes(whole)
    assert find_damage(folder) is None


async def test_if_none_is_complete_that_is_an_error_with_the_remedy_and_nothing_is_renamed(tmp_path: Path) -> None:
    for step in (5, 10):
        folder = await save_one(tmp_path, step)
        flip(folder / "weights", 0)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is intact \(step_000010: weights .*; step_000005: "
                       r"weights .*\); put one back from a copy, or start a new run"):  # fmt: skip
        await newest(tmp_path, [])
    assert len(list_checkpoints(tmp_path)) == 2


async def test_no_checkpoint_at_all_is_a_run_from_the_beginning(tmp_path: Path) -> None:
    assert await load_newest(tmp_path, FileBackend()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 5}', '{"sampler_position": [0, 0], "surprise": 1}'])
async def test_a_state_of_another_form_is_an_error_with_a_remedy(tmp_path: Path, content: str) -> None:
    """Whole, but not ours: as from another version of Headrace."""
    folder = await save_one(tmp_path, 5)
    (folder / "trainer.json").write_text(content)
    (folder / NAME).unlink()
    seal(folder)
    backend = FileBackend()
    with pytest.raises(BackendError, match=r"cannot read the checkpoint .*; choose another one"):
        await load_checkpoint(folder, backend)  # type: ignore[arg-type]
    assert backend.weights == 0
