"""`fit()` under a running event loop, as a notebook has one; a configuration as a dict; names from the package."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import headrace
from fakes import ROOT
from headrace.data.task import Task
from headrace.errors import ConfigError, WorkflowError
from headrace.rollout.model_client import Model
from headrace.trainer.callbacks import Callback
from headrace.trainer.trainer import UnifiedTrainer
from null_backend import Null, null_config, null_trainer, scattered, some_tasks


async def test_fit_works_under_a_running_event_loop(tmp_path: Path) -> None:
    trainer = null_trainer(tmp_path, trainer={"steps": 3})
    with redirect_stdout(StringIO()):
        result = trainer.fit()
    assert result.steps == 3 and not result.interrupted
    await asyncio.sleep(0)  # our own loop is as it was


async def test_fit_under_a_running_event_loop_raises_what_ended_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match=r"on_batch_end of the callback Leaves called sys.exit\(3\)"):
        null_trainer(tmp_path, callbacks=[Leaves()]).fit()


class Leaves(Callback):
    def on_batch_end(self, step: int, metrics: Any) -> None:
        sys.exit(3)


class Interrupts(Callback):
    """Presses Ctrl-C at the end of the second step."""

    def __init__(self, times: int = 1) -> None:
        self._times = times
        self.handled = threading.Event()

    async def on_batch_end(self, step: int, metrics: Any) -> None:
        for _ in range(self._times if step == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.5)


async def test_the_first_interrupt_under_a_running_loop_stops_after_the_step(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with redirect_stdout(StringIO()):
            result = null_trainer(tmp_path, callbacks=[Interrupts()], trainer={"steps": 50}).fit()
        assert result.interrupted and 2 <= result.steps < 50
    finally:
        signal.signal(signal.SIGINT, before)


async def test_the_second_interrupt_under_a_running_loop_ends_the_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            null_trainer(tmp_path, callbacks=[Interrupts(2)], trainer={"steps": 50}).fit()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_callback_of_the_event_loop_that_exits_does_not_end_the_run(tmp_path: Path) -> None:
    async def leaves(task: Task, model: Model) -> float:
        asyncio.get_running_loop().call_soon(sys.exit, 0)
        return await scattered(task, model)

    with redirect_stdout(StringIO()):
        assert null_trainer(tmp_path, leaves, trainer={"steps": 2}).fit().steps == 2
    assert "a callback of the event loop ended: SystemExit: 0" in (tmp_path / "run" / "log.txt").read_text()


def test_a_trainer_takes_a_dict_and_checks_it_as_a_run_file(tmp_path: Path) -> None:
    headrace.register("backend", "null", Null())
    values = null_config(tmp_path, trainer={"steps": 2}).model_dump(mode="json", exclude_unset=True)
    assert UnifiedTrainer(values, scattered, some_tasks()).config.trainer.steps == 2
    with pytest.raises(ConfigError, match=r'unknown key "trainer.step" \(did you mean "steps"\?\)'):
        UnifiedTrainer({"trainer": {"step": 2}})


def test_every_name_of_the_package_can_be_imported_and_importing_it_stays_light() -> None:
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
    code = "import headrace, sys; print(sorted({'torch', 'numpy', 'pydantic', 'asyncio'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"
