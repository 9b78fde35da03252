"""Every failure is loud: it ends the run with its own exception, or is counted where it is an episode's. None hangs.

All but the last few run on the null backend and a virtual clock, where a hang is an error.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_callbacks import EVAL, EVENTS
from test_schedules import POLICIES, heavy_tail

import null_backend
from headrace import registry
from headrace.cli.main import run as run_command
from headrace.config import AlarmSection
from headrace.data.sampler import TaskSampler
from headrace.data.task import Task
from headrace.engines.base import EngineHealth
from headrace.errors import BackendError, DataError, EngineError, HeadraceError, WeightSyncError, WorkflowError
from headrace.judge.base import Judger, Verdict
from headrace.rollout.model_client import Model
from headrace.scheduling.buffer import TrajectoryGroupBuffer
from headrace.scheduling.staleness import Mask, StalenessPolicy
from headrace.trainer.alarms import Alarms
from headrace.trainer.callbacks import Callback
from null_backend import Null, NullBackend, NullEngine, Ran, null_run, scattered

SCHEDULES: dict[str, dict[str, Any]] = {
    "in step": {"max_staleness": 0},
    "ahead": {"max_staleness": 2, "placement": "separate"},
    "ahead, shared": {"max_staleness": 2, "stream": True, "partial_rollouts": False},
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


class Broken(Exception):
    """None of ours, so nobody expects it."""


def breaking(after: int = 0, error: Exception | None = None) -> Any:
    """Something that can be called so often, and then breaks."""
    calls = 0

    def call(*args: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error or Broken("it broke")

    return call


def break_method(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int = 0, error: Exception | None = None
) -> None:
    """A method that works so many times, and then raises instead."""
    works, stop = getattr(owner, name), breaking(after, error)

    async def awaited(*args: Any, **named: Any) -> Any:
        stop()
        return await works(*args, **named)

    def called(*args: Any, **named: Any) -> Any:
        stop()
        return works(*args, **named)

    monkeypatch.setattr(owner, name, awaited if asyncio.iscoroutinefunction(works) else called)


def failing_run(run_dir: Path, schedule: str, *args: Any, **given: Any) -> Ran:
    """A run that is to fail; whatever happens, it must not leave an engine open or a request running."""
    null = given.setdefault("null", Null(heavy_tail, 1.0))
    trainer = {**SCHEDULES[schedule], **given.pop("trainer", {})}
    try:
        return null_run(run_dir, *args, trainer=trainer, **given)
    finally:
        assert null.made[-1].closed and null.made[-1].engine.closed and not null.made[-1].engine.running


# ---- what ends the run ----------------------------------------------------------------------------------------------


@every_schedule
def test_a_broken_grouping_hook_ends_the_run(tmp_path: Path, schedule: str) -> None:
    registry.register("grouping", "broken", breaking())
    with pytest.raises(WorkflowError, match=r'grouping hook "broken" failed on task "task \d+": Broken: it broke'):
        failing_run(tmp_path, schedule, workflow={"grouping": "broken"})


@every_schedule
def test_a_broken_estimator_ends_the_run(tmp_path: Path, schedule: str) -> None:
    registry.register("estimator", "broken", breaking())
    trainer = {"stream": None}  # it may compare groups with each other
    with pytest.raises(Broken, match="it broke"):
        failing_run(tmp_path, schedule, algorithm={"estimator": "broken"}, trainer=trainer)


@every_schedule
@pytest.mark.parametrize("method", ["add", "take", "take_used", "retain"])
def test_a_broken_buffer_ends_the_run(
    tmp_path: Path, schedule: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_method(monkeypatch, TrajectoryGroupBuffer, method, after=2)
    with pytest.raises(Broken, match="it broke"):
        failing_run(tmp_path, schedule)


@every_schedule
@pytest.mark.parametrize("method", ["generate", "begin_update", "end_update"])
@pytest.mark.parametrize("error", [EngineError("out of memory"), Broken("out of memory")])
def test_a_broken_engine_ends_the_run(
    tmp_path: Path, schedule: str, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_method(monkeypatch, NullEngine, method, after=2, error=error)
    with pytest.raises(EngineError if method == "generate" else type(error), match="out of memory"):
        failing_run(tmp_path, schedule)


@pytest.mark.parametrize("method", ["pause", "resume", "release_cache"])
def test_an_engine_that_cannot_be_handed_over_ends_the_run(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_method(monkeypatch, NullEngine, method, after=2)
    with pytest.raises(Broken, match="it broke"):
        failing_run(tmp_path, "in step")


@every_schedule
def test_a_workflow_cannot_hide_that_the_engine_broke(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def careless(task: Task, model: Model) -> float:
        reward = await scattered(task, model)
        with suppress(Exception):
            await model.chat(task.messages)
        return reward

    break_method(monkeypatch, NullEngine, "generate", after=9, error=EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        failing_run(tmp_path, schedule, careless)


@every_schedule
def test_an_engine_that_says_it_is_dead_ends_the_run(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never_answers(*args: Any, **named: Any) -> None:
        await asyncio.Event().wait()

    dead = EngineHealth(False, False, 0, 0, 0, 0, 0.0, error="its process was killed")
    monkeypatch.setattr(NullEngine, "generate", never_answers)
    monkeypatch.setattr(NullEngine, "health", lambda engine: dead)
    with pytest.raises(EngineError, match="its process was killed"):
        failing_run(tmp_path, schedule)


@every_schedule
@pytest.mark.parametrize("method", ["forward_backward", "optim_step", "send", "save"])
@pytest.mark.parametrize("error", [BackendError("no memory left"), Broken("no memory left")])
def test_a_broken_learner_ends_the_run(
    tmp_path: Path, schedule: str, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_method(monkeypatch, NullBackend, method, after=2, error=error)
    with pytest.raises(type(error), match="no memory left"):
        failing_run(tmp_path, schedule, trainer={"save_every": 1})


def test_a_learner_that_cannot_measure_old_rows_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_method(monkeypatch, NullBackend, "compute_logprobs")
    with pytest.raises(Broken, match="it broke"):
        failing_run(tmp_path, "ahead", trainer={"steps": 40, "max_staleness": 1, "staleness": "trust"})


@every_schedule
def test_weights_that_cannot_be_synced_at_the_start_end_the_run(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_method(monkeypatch, NullBackend, "send", error=WeightSyncError("they did not arrive"))
    with pytest.raises(WeightSyncError, match="they did not arrive"):
        failing_run(tmp_path, schedule)


@every_schedule
def test_a_sampler_that_samples_from_other_weights_ends_the_run(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = null_backend.logprob
    engine_only = [True]

    def generate(engine: NullEngine, *args: Any, **named: Any) -> Any:
        monkeypatch.setattr(null_backend, "logprob", lambda token, weights: true(token, weights) - engine_only[0])
        return works(engine, *args, **named)

    def learn(backend: NullBackend, sample: Any) -> Any:
        monkeypatch.setattr(null_backend, "logprob", true)
        return learns(backend, sample)

    works, learns = NullEngine.generate, NullBackend._trained_logprobs
    monkeypatch.setattr(NullEngine, "generate", generate)
    monkeypatch.setattr(NullBackend, "_trained_logprobs", learn)
    with pytest.raises(WeightSyncError, match="differ by 1 on average on tokens of the same version"):
        failing_run(tmp_path, schedule, null=Null(checks=False))


@every_schedule
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_broken_callback_ends_the_run(tmp_path: Path, schedule: str, event: str, asynchronous: bool) -> None:
    async def later(*args: Any) -> None:
        await asyncio.sleep(0.1)
        raise Broken(event)

    method = later if asynchronous else breaking(error=Broken(event))
    broken: Callback = type("BrokenCallback", (Callback,), {event: method})()
    with pytest.raises(Broken, match=event):
        failing_run(tmp_path, schedule, callbacks=[broken], eval=EVAL, trainer={"steps": 9})


@every_schedule
def test_a_broken_sampler_ends_the_run(tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_method(monkeypatch, TaskSampler, "next_batch", after=1)
    with pytest.raises(Broken, match="it broke"):
        failing_run(tmp_path, schedule)


@every_schedule
def test_a_sampler_that_breaks_when_a_group_is_replaced_ends_the_run(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_method(monkeypatch, TaskSampler, "next")
    with pytest.raises(Broken, match="it broke"):
        failing_run(tmp_path, schedule, always_right, filters={"drop_uniform": True})


@pytest.mark.parametrize("schedule", ["ahead", "ahead, shared"])
@pytest.mark.parametrize("method", ["limit", "observe", "is_stale"])
def test_a_broken_staleness_policy_ends_the_run(tmp_path: Path, schedule: str, method: str) -> None:
    registry.register("staleness", "broken", type("BrokenPolicy", (StalenessPolicy,), {method: breaking()}))
    with pytest.raises(Broken, match="it broke"):
        failing_run(tmp_path, schedule, trainer={"staleness": "broken"})


@pytest.mark.parametrize("schedule", ["ahead", "ahead, shared"])
def test_an_evaluation_that_breaks_beside_training_ends_the_run(tmp_path: Path, schedule: str) -> None:
    async def breaks_the_engine(task: Task, model: Model) -> float:
        if not model.training:
            raise EngineError("the pinned weights are gone")
        return await scattered(task, model)

    with pytest.raises(EngineError, match="the pinned weights are gone"):
        failing_run(tmp_path, schedule, breaks_the_engine, eval=EVAL)


# ---- what is an episode's own failure -------------------------------------------------------------------------------


def by_number(task: Task, every: int) -> bool:
    return int(task.id.split()[1]) % every == 0


async def always_right(task: Task, model: Model) -> float:
    await model.chat(task.messages)
    return 1.0


async def always_broken(task: Task, model: Model) -> float:
    await model.chat(task.messages)
    raise Broken("no such tool")


def failed(ran: Ran, steps: int = 6) -> float:
    """The failed episodes; all others are accounted for, and the run has made its steps."""
    last = ran.rows[-1]
    settled = sum(last[f"episodes/{end}"] for end in ("trained", "filtered", "failed", "stale", "pending"))
    assert last["episodes/dispatched"] == settled and ran.result.steps == steps
    return last["episodes/failed"]


@every_schedule
def test_an_exception_in_a_workflow_fails_its_episode(tmp_path: Path, schedule: str) -> None:
    async def flaky(task: Task, model: Model) -> float:
        reward = await scattered(task, model)
        if by_number(task, 3) and reward > 2:
            raise Broken("no such tool")
        return reward

    assert failed(failing_run(tmp_path, schedule, flaky)) > 0
    assert "Broken: no such tool at" in (tmp_path / "run" / "log.txt").read_text()


class FlakyJudger(Judger):
    """Breaks, or never answers, for every third task."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def judge(self, task: Task, episode: Any) -> Verdict:
        if by_number(task, 3) and self._how == "hangs":
            await asyncio.Event().wait()
        if by_number(task, 3):
            raise Broken("no such judge")
        return Verdict(float(len(episode.text) % 2))


@every_schedule
@pytest.mark.parametrize("how", ["breaks", "hangs"])
def test_a_judger_that_breaks_or_hangs_fails_its_episode(tmp_path: Path, schedule: str, how: str) -> None:
    registry.register("judger", "flaky", FlakyJudger(how))
    workflow = {"name": "single_turn", "judger": "flaky"}
    ran = failing_run(tmp_path, schedule, None, workflow=workflow, rollout={"timeout_s": 60.0})
    assert failed(ran) > 0 and all(int(sample.task_id.split()[1]) % 3 for sample in ran.backend.rows)


@every_schedule
def test_a_hung_tool_is_cut_by_the_time_limit_and_the_run_continues(tmp_path: Path, schedule: str) -> None:
    async def hung(task: Task, model: Model) -> float:
        if by_number(task, 4):
            await asyncio.Event().wait()
        return await scattered(task, model)

    ran = failing_run(tmp_path, schedule, hung, null=Null(learn_s=1.0), rollout={"timeout_s": 3.0})
    assert failed(ran) > 0 and not any(int(sample.task_id.split()[1]) % 4 == 0 for sample in ran.backend.rows)


@every_schedule
def test_a_request_that_the_engine_never_answers_is_cut_by_the_time_limit(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = NullEngine.generate

    async def lost(engine: NullEngine, prompt_ids: Any, params: Any, seed: int, pinned: bool = False) -> Any:
        if seed % 5 == 0:
            await asyncio.Event().wait()
        return await works(engine, prompt_ids, params, seed, pinned)

    monkeypatch.setattr(NullEngine, "generate", lost)
    assert failed(failing_run(tmp_path, schedule, rollout={"timeout_s": 60.0})) > 0


@every_schedule
@pytest.mark.parametrize("policy", POLICIES)
def test_a_workflow_that_always_fails_ends_the_run_with_its_cause(tmp_path: Path, schedule: str, policy: str) -> None:
    with pytest.raises(DataError, match=r"^\d groups in a row were dropped.*Broken: no such tool"):
        failing_run(tmp_path, schedule, always_broken, trainer={"staleness": policy})


@every_schedule
def test_a_workflow_that_always_hangs_ends_the_run_with_its_cause(tmp_path: Path, schedule: str) -> None:
    async def hung(task: Task, model: Model) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(DataError, match="took longer than 60 s"):
        failing_run(tmp_path, schedule, hung, rollout={"timeout_s": 60.0})


@every_schedule
def test_a_judger_that_always_fails_ends_the_run_with_its_cause(tmp_path: Path, schedule: str) -> None:
    registry.register("judger", "broken", type("BrokenJudger", (Judger,), {"judge": breaking()})())
    with pytest.raises(DataError, match="Broken: it broke"):
        failing_run(tmp_path, schedule, None, workflow={"name": "single_turn", "judger": "broken"})


# ---- data that cannot be trained ------------------------------------------------------------------------------------


@every_schedule
@pytest.mark.parametrize("policy", POLICIES)
def test_uniform_data_end_the_run_with_their_cause(tmp_path: Path, schedule: str, policy: str) -> None:
    with pytest.raises(DataError, match="100 groups in a row were dropped, the last because of: uniform rewards"):
        failing_run(tmp_path, schedule, always_right, filters={"drop_uniform": True}, trainer={"staleness": policy})


@every_schedule
def test_groups_of_which_one_episode_is_left_are_not_called_uniform(tmp_path: Path, schedule: str) -> None:
    begun: set[str] = set()

    async def works_once(task: Task, model: Model) -> float:
        first = task.id not in begun
        begun.add(task.id)
        reward = await scattered(task, model)
        if not first:
            raise Broken("no such tool")
        return reward

    tasks = [Task(str(number), instruction="Say it.") for number in range(999)]
    with pytest.raises(DataError, match=r"1 of 2 episodes failed, and one alone .*Broken: no such tool") as caught:
        failing_run(tmp_path, schedule, works_once, tasks, filters={"drop_uniform": True, "most_replacements": 9})
    assert "uniform" not in str(caught.value)


def test_a_batch_without_signal_because_episodes_failed_is_not_called_uniform() -> None:
    said: list[str] = []
    alarms = Alarms(AlarmSection(), (), True, said.append)
    values = {"reward/uniform_groups": 1.0, "policy/grad_norm": 0.0, "reward/mean": 0.0, "batch/failed": 14.0}
    alarms.check(3, values)
    assert "14 episodes of the batch failed" in said[0]
    alarms.check(4, {**values, "batch/failed": 0.0})
    assert "in every group all rewards are equal" in said[1]


@pytest.mark.parametrize("schedule", ["in step", "ahead"])
def test_partly_solved_tasks_that_never_come_end_the_run_with_their_cause(tmp_path: Path, schedule: str) -> None:
    filters = {"min_partial_tasks": 2, "most_replacements": 7}
    with pytest.raises(DataError, match="min_partial_tasks wants 2 partly solved tasks, and 24 tasks in 7 batches"):
        failing_run(tmp_path, schedule, always_right, filters=filters)


@pytest.mark.parametrize("schedule", ["ahead", "ahead, shared"])
def test_batches_of_which_nothing_may_be_trained_end_the_run_with_their_cause(tmp_path: Path, schedule: str) -> None:
    class Nothing(Mask):
        def limit(self, samples: Any, version: int, measured: Any, metrics: Any) -> list[Any]:
            return super().limit(samples, version + 1000, measured, metrics)

    registry.register("staleness", "nothing", Nothing)
    with pytest.raises(DataError, match=r"4 batches in a row held nothing to train: .*staleness/masked_tokens"):
        failing_run(tmp_path, schedule, trainer={"staleness": "nothing"}, filters={"most_replacements": 4})


# ---- the command line -----------------------------------------------------------------------------------------------

MINE = """
import asyncio
from headrace.trainer.callbacks import Callback
from headrace.errors import BackendError, EngineError

async def works(task, model):
    reply = await model.chat(task.messages)
    return float(sum(reply.completion_ids) % 5)

async def fails(task, model):
    raise RuntimeError("no such tool")

async def breaks_the_engine(task, model):
    raise EngineError("out of memory")

def grouping(episodes):
    raise RuntimeError("no such role")

def judger(task, text):
    raise RuntimeError("no such judge")

def estimator(groups, algorithm):
    raise BackendError("no such advantage")

class Breaks(Callback):
    def on_batch_end(self, step, metrics):
        raise RuntimeError("no such callback")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[str]:
    registry.register("backend", "null", Null())
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    (tmp_path / "run.toml").write_text(
        f'run.dir = "{tmp_path}"\nworkflow.name = "{path}:works"\ndata.args.count = 9\nrollout.group_size = 4\n'
        f'trainer = {{ steps = 3, batch_size = 2 }}\ntrack = {{ trackers = ["jsonl"], plot = false }}\n'
    )
    yield str(path)


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("--workflow.name={mine}:fails", "its last error: RuntimeError: no such tool"),
        ("--workflow.name={mine}:breaks_the_engine", "out of memory"),
        ("--workflow.grouping={mine}:grouping", "RuntimeError: no such role"),
        ("--algorithm.estimator={mine}:estimator", "no such advantage"),
        ("--workflow.name=single_turn --workflow.judger={mine}:judger", "RuntimeError: no such judge"),
    ],
)
def test_the_command_line_names_the_cause_and_does_not_exit_with_0(
    tmp_path: Path, mine: str, setting: str, says: str, bound: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = setting.format(mine=mine).split()
    null = ["--backend.name=null", "--engine.name=null", f"--trainer.max_staleness={bound}"]
    command = ["train", str(tmp_path / "run.toml"), *null, *words]
    assert run_command(command) == 2
    *warned, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and says in error
    assert len(warned) <= 3 and all(line.startswith("warning: ") for line in warned)  # of each kind the first few


@pytest.mark.parametrize("bound", [0, 2])
def test_the_process_ends_with_the_traceback_of_an_exception_that_is_not_ours(
    tmp_path: Path, mine: str, bound: int
) -> None:
    settings = [f"--trainer.max_staleness={bound}", f'--trainer.callbacks=["{mine}:Breaks"]']
    command = [sys.executable, "-m", "headrace", "train", str(tmp_path / "run.toml"), *settings,
               "--backend.name=null_backend:NullBackend", "--engine.name=null_backend:NULL_ENGINE"]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "RuntimeError: no such callback" in done.stderr


# ---- on the local backend -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("error", ["RuntimeError", "headrace.errors.DivergedError"])
def test_a_broken_loss_ends_the_run(tmp_path: Path, bound: int, error: str) -> None:
    from headrace.config.loading import build_config
    from headrace.trainer.trainer import UnifiedTrainer

    module = tmp_path / "mine.py"
    module.write_text(f"import headrace.errors\ndef own(context):\n    raise {error}('no such loss')\n")
    config = build_config(
        {
            "run": {"dir": str(tmp_path)},
            "workflow": {"judger": "countdown"},
            "algorithm": {"loss": f"{module}:own"},
            "rollout": {"group_size": 2, "max_tokens": 4},
            "trainer": {"steps": 2, "batch_size": 2, "max_staleness": bound},
            "data": {"args": {"count": 8}},
            "track": {"trackers": ["jsonl"], "plot": False},
        }
    )
    with pytest.raises(RuntimeError if error == "RuntimeError" else HeadraceError, match="no such loss"):
        UnifiedTrainer(config).fit()


def test_settings_for_a_role_that_never_came_are_warned_of_once() -> None:
    said: list[str] = []
    alarms = Alarms(AlarmSection(), {"solvr", "agent"}, True, said.append)
    alarms.check_roles(1, set())  # nothing came yet
    alarms.check_roles(2, {"agent", "solver"})
    alarms.check_roles(3, {"agent", "solver"})
    (warning,) = said
    assert "algorithm.roles.solvr has had no effect" in warning and "there were agent, solver" in warning
