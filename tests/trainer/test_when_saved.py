"""When checkpoints are written, which of them are kept, and what the closing panel says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint_data import some_config
from headrace.run.checkpoint_writer import steps_to_keep
from headrace.trainer.callbacks import Saving
from null_backend import null_trainer


class Clocked:
    """A trainer of which only saving is of interest; a step takes `step_s`, and saving `save_s`."""

    def __init__(self, step_s: float = 1.0, save_s: float = 0.0, **trainer: Any) -> None:
        self.config = some_config(**{"steps": 10, **trainer})
        self.step = 0
        self.now_s = 100.0
        self.saved: list[int] = []
        self._step_s, self._save_s = step_s, save_s
        self.saving = Saving(lambda: self.now_s)

    async def save(self) -> None:
        self.now_s += self._save_s
        self.saved.append(self.step)

    async def run(self, until: int | None = None) -> list[int]:
        own: Any = self
        self.saving.on_train_start(own)
        steps = self.config.trainer.steps
        while self.step < (steps if until is None else until):
            self.saving.on_batch_start(self.step)
            self.step += self.config.trainer.updates_per_batch
            self.now_s += self._step_s
            evaluation_asks = self.saving.due(self.step)
            self.now_s += self._step_s / 2  # it took its time: what was decided stands
            await self.saving.on_batch_end(self.step, {})
            assert (self.saved[-1:] == [self.step]) == evaluation_asks
        await self.saving.on_train_end(own)
        return self.saved


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ({"save_every_s": 0}, [10]),
        ({}, [10]),
        ({"step_s": 100.0}, [5, 10]),
        ({"step_s": 100.0, "save_every_s": 0}, [10]),
        ({"step_s": 100.0, "save_last": False}, [5]),
        ({"step_s": 1.0, "save_every_s": 4.0}, [3, 6, 9, 10]),
        ({"step_s": 1.0, "save_every_s": 4.0, "save_s": 50.0}, [3, 6, 9, 10]),
        ({"step_s": 1.0, "save_every_s": 4.0, "save_every": 4}, [3, 4, 7, 8, 10]),
        ({"step_s": 1.0, "save_every_s": 1e9, "save_every": 3}, [3, 6, 9, 10]),
        ({"step_s": 100.0, "updates_per_batch": 2}, [10]),
        ({"step_s": 400.0, "updates_per_batch": 2}, [4, 8, 10]),
    ],
)
async def test_a_run_saves_by_steps_and_by_time(given: dict[str, Any], saved: list[int]) -> None:
    assert await Clocked(**given).run() == saved


async def test_a_run_that_is_stopped_saves_once() -> None:
    assert await Clocked(save_every_s=0).run(until=4) == [4]
    assert await Clocked(save_every_s=0, save_every=4).run(until=4) == [4]


@pytest.mark.parametrize(
    ("trainer", "steps", "kept"),
    [
        ({"keep_last": 2}, [3, 7, 9], {7, 9}),
        ({"keep_last": 2, "save_every": 10}, [10, 20, 23], {10, 20, 23}),
        ({"keep_last": 2, "save_every": 10}, [10, 20, 23, 27], {10, 20, 27}),
        ({"keep_last": 2, "save_every": 10}, [10, 20, 27, 30], {20, 30}),
        ({"keep_last": 3, "save_every": 10}, [3, 5, 10, 13], {5, 10, 13}),
        ({"keep_last": 1, "save_every": 10}, [3, 5], {5}),
        ({"keep_last": 2, "save_every": 10, "updates_per_batch": 4}, [12, 16, 20, 24], {12, 20, 24}),
    ],
)
def test_saves_by_time_do_not_displace_those_of_save_every(
    trainer: dict[str, Any], steps: list[int], kept: set[int]
) -> None:
    assert steps_to_keep(steps, some_config(**trainer).trainer, {}) == kept


@pytest.mark.parametrize("trackers", [["jsonl"], []])
@pytest.mark.parametrize("save_last", [True, False])
def test_the_closing_panel_names_only_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trackers: list[str],
    save_last: bool,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    trainer = {"steps": 1, "batch_size": 3, "save_last": save_last}
    null_trainer(Path("runs"), trainer=trainer, track={"trackers": trackers, "plot": False}).fit()
    said = capsys.readouterr().out
    assert ("metrics.jsonl" in said) == bool(trackers) and "tensorboard" not in said
    assert ("headrace export" in said) == save_last
    assert "README" not in said
