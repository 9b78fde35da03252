"""Callbacks and evaluation: what is told when, in every schedule, on the null backend and a virtual clock."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from test_schedules import heavy_tail, schedules

from headrace import registry
from headrace.data.task import Task
from headrace.errors import WorkflowError
from headrace.rollout.model_client import Model
from headrace.trainer.callbacks import Callback, Metrics, TrainerHandle, due
from null_backend import Null, null_run, reported, scattered

EVENTS = [name for name in vars(Callback) if name.startswith("on_")]
EVAL: dict[str, Any] = {"every": 2, "sets": {"held_out": {"tasks": "null_backend:some_tasks", "args": {"count": 4}}}}
SEPARATE: dict[str, Any] = {"max_staleness": 2, "placement": "separate", "steps": 7}


def recorder(asynchronous: bool = False) -> tuple[Callback, list[tuple[Any, ...]]]:
    """A callback that keeps what it is told, with plain or with async methods."""
    told: list[tuple[Any, ...]] = []

    def method(event: str) -> Any:
        def keep(self: Callback, *arguments: Any) -> None:
            told.append((event.removeprefix("on_"), *(a for a in arguments if isinstance(a, int | str))))

        async def keep_later(self: Callback, *arguments: Any) -> None:
            await asyncio.sleep(0.001)
            keep(self, *arguments)

        return keep_later if asynchronous else keep

    made: Callback = type("Recorder", (Callback,), {event: method(event) for event in EVENTS})()
    return made, told


def test_every_event_is_reported_in_the_same_order_in_every_schedule(tmp_path: Path) -> None:
    wanted: list[tuple[Any, ...]] = [("train_start",), ("epoch_start", 0)]
    for step in range(3):  # 9 tasks: an epoch is three batches of three
        wanted += [("batch_start", step), ("policy_updated", step + 1, f"weights {step + 1}"), ("batch_end", step + 1)]
    wanted += [("epoch_end", 0), ("epoch_start", 1), ("batch_start", 3), ("policy_updated", 4, "weights 4")]
    wanted += [("batch_end", 4), ("epoch_end", 1), ("train_end",)]
    for number, trainer in enumerate(schedules(staleness="count", steps=4)):
        callback, told = recorder(asynchronous=bool(number % 2))
        tasks = [Task(str(i), instruction="Say it.") for i in range(9)]
        null_run(tmp_path / str(number), scattered, tasks, null=Null(heavy_tail, 1.0), callbacks=[callback],
                 trainer=trainer)  # fmt: skip
        assert told == wanted, trainer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_evaluation_is_reported_within_its_step_when_synchronous_and_concurrently_when_ahead(
    tmp_path: Path, asynchronous: bool
) -> None:
    callback, told = recorder(asynchronous)
    null_run(tmp_path / "in step", null=Null(heavy_tail, 1.0), callbacks=[callback], trainer={"steps": 3}, eval=EVAL)
    assert told[6:] == [
        ("policy_updated", 2, "weights 2"), ("validation_start", 2), ("validation_end", 2), ("batch_end", 2),
        ("batch_start", 2), ("policy_updated", 3, "weights 3"), ("batch_end", 3), ("epoch_end", 0), ("train_end",),
    ]  # fmt: skip
    callback, told = recorder(asynchronous)
    null_run(tmp_path / "ahead", null=Null(heavy_tail, 0.1), callbacks=[callback], trainer=SEPARATE, eval=EVAL)
    validations = [event for event in told if event[0].startswith("validation")]
    assert validations == [(f"validation_{edge}", step) for step in (2, 4, 6) for edge in ("start", "end")]
    assert told.index(("validation_end", 2)) > told.index(("batch_start", 2))  # training went on beside it
    rest = [event for event in told if not event[0].startswith("validation")]
    assert rest[-3:] == [("batch_end", 7), ("epoch_end", 0), ("train_end",)]


def order_of(run_dir: Path, trainer: dict[str, Any], evaluation: dict[str, Any]) -> list[tuple[Any, ...]]:
    """All events of a run, with those of its workflow; no callback is called while another is."""
    told: list[tuple[Any, ...]] = []
    busy: list[str] = []

    def method(event: str) -> Any:
        async def keep(self: Callback, *arguments: Any) -> None:
            assert not busy, f"{event} came during {busy}"
            busy.append(event)
            told.append((event.removeprefix("on_"), *(a for a in arguments if isinstance(a, int))))
            await asyncio.sleep(0.2)
            busy.remove(event)

        return keep

    class Solves:
        async def start(self) -> None:
            await asyncio.sleep(0.01)
            told.append(("workflow started",))

        async def run(self, task: Task, model: Model) -> float:
            if told[-1] == ("workflow started",):
                told.append(("first episode",))
            return await scattered(task, model)

        async def close(self) -> None:
            told.append(("workflow closed",))

    recorder: Callback = type("Recorder", (Callback,), {event: method(event) for event in EVENTS})()
    tasks = [Task(str(i), instruction="Say it.") for i in range(9)]
    null_run(run_dir, Solves(), tasks, null=Null(heavy_tail, 1.0), callbacks=[recorder], trainer=trainer,
             eval=evaluation)  # fmt: skip
    return told


def test_the_order_of_callbacks_with_evaluations_is_the_same_in_every_schedule(tmp_path: Path) -> None:
    evaluation = {**EVAL, "before": True, "after": True}
    orders: list[list[tuple[Any, ...]]] = []
    for number, trainer in enumerate(schedules(staleness="count", steps=5)):
        told = order_of(tmp_path / str(number), trainer, evaluation)
        assert told[0] == ("workflow started",) and told[-2:] == [("train_end",), ("workflow closed",)]
        assert told[1:4] == [("train_start",), ("validation_start", 0), ("validation_end", 0)]
        for step in (2, 4):  # reported before the end of its own step, or of a later one where generation runs ahead
            end = told.index(("validation_end", step))
            following = next(event for event in told[end + 1 :] if not event[0].startswith("validation"))
            assert following[0] == "batch_end" and following[1] >= step
            assert trainer.get("max_staleness") or following[1] == step
        orders.append([event for event in told if event[0] != "validation_end"])
    assert all(order == orders[0] for order in orders)
    begins = orders[0].index(("validation_start", 2))
    assert orders[0][begins - 1][0] == "policy_updated" and orders[0][begins + 1] == ("batch_end", 2)


class Held:
    """A workflow that counts how often it is started and closed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    async def run(self, task: Task, model: Model) -> float:
        self.calls = [*self.calls, "run"][:3]
        return await scattered(task, model)

    def close(self) -> None:
        self.calls.append("close")


def test_a_workflow_is_started_once_before_its_first_episode_and_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    held, made = Held(), []

    class Own(Held):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    registry.register("workflow", "own", Own)
    sets = {"held_out": EVAL["sets"]["held_out"], "own": {**EVAL["sets"]["held_out"], "workflow": "own"}}
    null_run(tmp_path, held, trainer={"steps": 2}, eval={**EVAL, "before": True, "sets": sets})
    assert held.calls == ["start", "run", "run", "close"]
    assert [own.calls for own in made] == [["start", "run", "run", "close"]]


def test_a_start_that_fails_ends_the_run_with_its_cause_and_everything_is_closed(tmp_path: Path) -> None:
    class Fails(Held):
        def start(self) -> None:
            raise LookupError("no such server")

    held = Fails()
    with pytest.raises(WorkflowError, match="start of the workflow Fails failed: LookupError: no such server at"):
        null_run(tmp_path, held)
    assert held.calls == ["close"]


class Returns(Callback):
    """Has figures of its own, and sees those of the callbacks before it."""

    def __init__(self, asynchronous: bool) -> None:
        self.seen: list[Metrics] = []
        if asynchronous:
            self.on_batch_end = self._later  # type: ignore[method-assign]

    def on_train_start(self, trainer: TrainerHandle) -> dict[str, float]:
        return {"mine/before": 5.0}

    def on_batch_end(self, step: int, metrics: Metrics) -> Any:
        self.seen.append(metrics)
        return {"mine/step": step * 10.0}

    async def _later(self, step: int, metrics: Metrics) -> dict[str, float]:
        return Returns.on_batch_end(self, step, metrics)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_callback_returns_is_tracked_and_seen_by_those_after_it(tmp_path: Path, asynchronous: bool) -> None:
    first, second = Returns(asynchronous), Returns(asynchronous)
    assert inspect.iscoroutinefunction(first.on_batch_end) == asynchronous
    trainer = {"steps": 2}
    ran = null_run(tmp_path, callbacks=[first, second], trainer=trainer, eval={**EVAL, "before": True})
    assert [row["mine/step"] for row in ran.rows] == [10.0, 20.0]
    assert "mine/step" not in first.seen[0] and second.seen[0]["mine/step"] == 10.0
    before = (ran.result.run_dir / "metrics.jsonl").read_text().splitlines()[0]
    assert '"mine/before": 5.0' in before and "eval/held_out/pass@1" in before


def test_a_callback_named_in_the_run_file_is_made_and_called(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from headrace.trainer.callbacks import Callback\n"
        "class Named(Callback):\n"
        "    def on_batch_end(self, step, metrics):\n"
        "        return {'named/seen': float(step)}\n"
    )
    ran = null_run(tmp_path, trainer={"steps": 2, "callbacks": [f"{tmp_path / 'mine.py'}:Named"]})
    assert [row["named/seen"] for row in ran.rows] == [1.0, 2.0]


# ---- evaluation -----------------------------------------------------------------------------------------------------


async def slow_evaluation(task: Task, model: Model) -> float:
    """In evaluation it asks twice, with a long wait in between; the reply tells which versions answered."""
    first = await model.chat(task.messages)
    if model.training:
        return float(sum(first.completion_ids) % 5)
    await asyncio.sleep(5.0)
    second = await model.chat([*task.messages, first.message, {"role": "user", "content": "Are you sure?"}])
    assert len({*first.versions, *second.versions}) == 1, "an evaluation saw two versions"
    return 100.0 + first.versions[0]


@pytest.mark.parametrize("placement", ["colocate", "separate"])
def test_evaluation_beside_training_is_pinned_and_drains_nothing(tmp_path: Path, placement: str) -> None:
    class Watches(Callback):
        """How many tokens were sampled for training, and how many versions came, during each evaluation."""

        def __init__(self) -> None:
            self.during: list[tuple[int, int]] = []

        def on_validation_start(self, step: int) -> None:
            engine = null.made[-1].engine
            self._before = engine.tokens, engine.version

        def on_validation_end(self, step: int, metrics: Metrics) -> None:
            engine = null.made[-1].engine
            self.during.append((engine.tokens - self._before[0], engine.version - self._before[1]))

    null, watches = Null(heavy_tail, 0.1), Watches()
    trainer = {**SEPARATE, "placement": placement, "steps": 16}
    evaluation = {**EVAL, "every": 4}
    ran = null_run(tmp_path, slow_evaluation, null=null, callbacks=[watches], trainer=trainer, eval=evaluation)
    rows = [row for row in ran.rows if "eval/step" in row]
    assert [row["eval/step"] for row in rows] == [4, 8, 12]
    for row in rows:
        assert row["eval/held_out/failed"] == 0
        assert row["eval/held_out/reward"] == 100 + row["eval/step"]  # the version of its step, whenever it ended
    assert all(tokens > 4 * 2 * 5 and versions > 0 for tokens, versions in watches.during)


@pytest.mark.parametrize("placement", ["colocate", "separate"])
def test_a_slow_callback_before_an_evaluation_does_not_make_it_one_of_later_weights(
    tmp_path: Path, placement: str
) -> None:
    class Slow(Callback):
        async def on_validation_start(self, step: int) -> None:
            await asyncio.sleep(7.0)

    ran = null_run(tmp_path, slow_evaluation, null=Null(heavy_tail, 0.1), callbacks=[Slow()], eval=EVAL,
                   trainer={**SEPARATE, "placement": placement})  # fmt: skip
    rows = [row for row in ran.rows if "eval/step" in row]
    assert len(rows) == 3 and all(row["eval/held_out/reward"] == 100 + row["eval/step"] for row in rows)


@pytest.mark.parametrize("placement", ["colocate", "separate"])
@pytest.mark.parametrize("partial", [True, False])
def test_synchronous_nothing_is_generated_beside_a_callback_or_an_evaluation(
    tmp_path: Path, placement: str, partial: bool
) -> None:
    async def look(self: Callback, *arguments: Any) -> None:
        engine = null.made[-1].engine
        before = engine.tokens
        await asyncio.sleep(50.0)
        assert engine.tokens == before and not engine.running

    events = ("on_batch_end", "on_policy_updated", "on_validation_start", "on_validation_end")
    looks: Callback = type("Looks", (Callback,), dict.fromkeys(events, look))()
    null = Null(heavy_tail, 1.0)
    trainer = {"placement": placement, "partial_rollouts": partial}
    ran = null_run(tmp_path, slow_evaluation, null=null, callbacks=[looks], trainer=trainer, eval=EVAL)
    assert ran.result.steps == 6


def test_eval_step_says_which_step_an_evaluation_is_of(tmp_path: Path) -> None:
    evaluation = {**EVAL, "before": True, "after": True, "every": 3}
    ran = null_run(tmp_path / "in step", slow_evaluation, trainer={"steps": 7}, eval=evaluation)
    assert {row["step"]: row["eval/step"] for row in ran.rows if "eval/step" in row} == {3: 3, 6: 6, 7: 7}
    assert ran.result.first_evaluation["eval/held_out/reward"] == 100
    assert ran.result.last_evaluation["eval/held_out/reward"] == 107
    ran = null_run(tmp_path / "ahead", slow_evaluation, null=Null(heavy_tail, 2.0), trainer=SEPARATE, eval=evaluation)
    found = {row["step"]: row["eval/step"] for row in ran.rows if "eval/step" in row}
    assert found[7] == 7 and set(found.values()) <= {3, 6, 7}
    assert all(step >= of for step, of in found.items())


def test_a_stopped_run_leaves_no_evaluation_and_nothing_pinned(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_start(self, trainer: TrainerHandle) -> None:
            self._trainer = trainer

        def on_validation_start(self, step: int) -> None:
            self._trainer.stop()

    ran = null_run(tmp_path, slow_evaluation, null=Null(heavy_tail, 0.1), callbacks=[Stops()], trainer=SEPARATE,
                   eval=EVAL)  # fmt: skip
    assert ran.result.interrupted and ran.backend.engine.pinned is None
    whole = null_run(tmp_path, slow_evaluation, null=Null(heavy_tail, 0.1), trainer=SEPARATE, eval=EVAL)
    assert whole.result.steps == 7
    assert [row["step"] for row in reported(whole.result.run_dir)] == list(range(1, 8))


def test_something_is_due_when_a_multiple_was_reached_or_passed() -> None:
    assert [step for step in range(1, 9) if due(3, step - 1, step)] == [3, 6]
    assert due(3, 2, 4) and not due(3, 3, 5) and not due(0, 0, 5)
