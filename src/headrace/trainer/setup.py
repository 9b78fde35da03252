"""From a configuration to the frozen parts of a run, and from there to a run that is ready for its loops.

Every name is looked up, and every object built, before the loops start; nothing is set on a part from afar later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.algorithms.objectives import Objective, demonstration_sampler
from headrace.backends.base import Backend, ChecksMachine, SaysNumerics, SaysWhere
from headrace.config import RunConfig
from headrace.config.derived import on_servers, samples_as_learned, uses_ray
from headrace.data.sampler import TaskSampler
from headrace.data.training import check_overlap, load_training, make_sampler, warn_of_bad_rows
from headrace.engines.base import RolloutEngine, pool_metrics
from headrace.evaluation.evaluator import Evaluator
from headrace.evaluation.plan import Tasks, check_tasks, evaluation_sets
from headrace.evaluation.setup import evaluation_parts
from headrace.judge.router import configured_judger
from headrace.registry import load_object, resolve
from headrace.rollout.agent_loop import AgentLoop, close_all, start_workflows
from headrace.rollout.gateway import close_gateway
from headrace.rollout.store import StoredValues, Values
from headrace.rollout.workflow import run_function
from headrace.run.agreement import missing_steps
from headrace.run.checkpoint import TrainerState, load_newest
from headrace.run.checkpoint_writer import CheckpointWriter, adopt
from headrace.run.directory import Claim, require_same_tasks
from headrace.run.journal import RunJournal
from headrace.run.ledger_journal import open_journal
from headrace.run.random_state import random_states
from headrace.scheduling.buffer import TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.lifecycle import GroupLifecycle
from headrace.scheduling.manager import AgentLoopManager, training_loop
from headrace.scheduling.staleness import StalenessPolicy
from headrace.tracking.base import RunInfo, TrackerSet
from headrace.trainer.alarms import Alarms
from headrace.trainer.callbacks import Callback, CallbackSet, Evaluating, Saving, Tracking
from headrace.trainer.checks import check_parts
from headrace.trainer.evaluations import Evaluations
from headrace.trainer.learner_step import LearnerStep
from headrace.trainer.recovery import Start, find_start, restore_loops
from headrace.trainer.step_clock import StepClock
from headrace.utils.deadline import end_user_tasks
from headrace.utils.own_command import own_command
from headrace.utils.threads import run_in_thread
from headrace.utils.usercode import Abandoned, reporting_abandoned
from headrace.weights.sync import WeightSync


@dataclass(frozen=True, slots=True)
class UserObjects:
    """Objects that the user gave instead of names."""

    workflow: Any = None
    tasks: Tasks | None = None
    judger: Any = None
    eval_tasks: dict[str, Tasks] | None = None
    callbacks: tuple[Callback, ...] = ()

    def objects(self) -> list[str]:
        """Which of them are given."""
        found = {"workflow": self.workflow, "judger": self.judger, "tasks": self.tasks, "eval_tasks": self.eval_tasks}
        return [*(what for what, one in found.items() if one is not None), *(["callbacks"] if self.callbacks else [])]

    def names(self) -> dict[str, str]:
        """What of it decides what is trained, by name: a run can be resumed only with the same."""
        found = {"workflow": self.workflow, "tasks": self.tasks, "judger": self.judger}
        return {what: _name_of(one) for what, one in found.items() if one is not None}


def _name_of(given: Any) -> str:
    return getattr(given, "__qualname__", None) or type(given).__qualname__


class StopRequest:
    """Whether the run is to stop after the current step."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.signalled = False
        """By a signal: what can be made when the run is resumed is not waited for."""

    @property
    def requested(self) -> bool:
        return self._since is not None

    def request(self, by_signal: bool = False) -> None:
        """Finish the current step, save, and end."""
        self.signalled |= by_signal
        self._since = time.monotonic() if self._since is None else self._since

    def seconds_ago(self) -> float:
        """Since it was requested; below 0 if it was not."""
        return -1.0 if self._since is None else time.monotonic() - self._since


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a configuration names, built: the model is loaded."""

    backend: Backend
    engine: RolloutEngine
    sync: WeightSync
    sampler: TaskSampler
    new_loop: Callable[[RunJournal], AgentLoop]
    evaluator: Evaluator
    objective: Objective
    policy: StalenessPolicy


def assemble(
    config: RunConfig,
    given: UserObjects | None = None,
    values: Values | None = None,
    report: Callable[[str], None] = lambda _: None,
    loading: Callable[[], None] = lambda: None,
) -> RunParts:
    """Build every part. Objects that are given go before what the configuration names. `report` gets what takes long,
    and `loading` is called when no setting is left to refuse.

    Names first, then tasks, then the model: what is cheap to find wrong is found before what is slow to load.
    """
    given = given or UserObjects()
    report("loading the training backend")
    backend = resolve("backend", config.backend.name)
    if isinstance(backend, ChecksMachine):
        backend.check_machine(config)
    choice = check_parts(config, given.objects())
    run = run_function(config.workflow, given.workflow)
    judge = configured_judger(config, given.judger)
    policy: StalenessPolicy = resolve("staleness", config.trainer.staleness)(config.trainer.max_staleness)
    new_objective = resolve("objective", config.algorithm.objective)
    supervised = config.algorithm.objective == "sft"
    loading()
    data = load_training(config.data, given.tasks, report)
    warn_of_bad_rows(data, "the training tasks")
    sampler = make_sampler(config.data, config.fresh_groups, config.run.seed, data)
    if not supervised:
        check_tasks(judge, data.tasks)
    if config.eval.sets:
        named = ", ".join(f'{name} ("{one.tasks}")' for name, one in config.eval.sets.items())
        report(f"reading the evaluation sets {named}")
    sets = evaluation_sets(config, given.eval_tasks, data)
    check_overlap(config.data, data.tasks, {name: tasks for name, (_, tasks) in sets.items()})
    demonstrations = demonstration_sampler(config)
    report(f"loading the model {config.model.name}")
    parts = evaluation_parts(config, run, judge, sets, choice, values)

    def new_loop(journal: RunJournal) -> AgentLoop:
        return training_loop(config, run, judge, parts.engine, parts.chat, journal=journal, values=values)

    objective: Objective = new_objective(config, parts.backend, parts.chat, demonstrations, policy)
    return RunParts(parts.backend, parts.engine, parts.sync, sampler, new_loop, parts.evaluator, objective, policy)


def placements(config: RunConfig) -> list[str]:
    """What was placed where on the cluster; nothing for a run on one machine."""
    if not uses_ray(config):
        return []
    return [placed.describe() for placed in load_object("headrace.cluster.placement:open_placements")()]


def numerics_of(config: RunConfig) -> dict[str, str]:
    """What the bits of a deterministic run depend on apart from its configuration; empty where no one promises any."""
    backend = resolve("backend", config.backend.name) if config.run.deterministic else None
    return backend.numerics(config) if isinstance(backend, SaysNumerics) else {}


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is ready for its loops."""

    config: RunConfig
    folder: Path
    start: Start
    stop: StopRequest
    backend: Backend
    engine: RolloutEngine
    sync: WeightSync
    manager: AgentLoopManager
    policy: StalenessPolicy
    journal: RunJournal
    trackers: TrackerSet
    callbacks: CallbackSet
    evaluating: Evaluating
    evaluations: Evaluations
    alarms: Alarms
    checkpoints: CheckpointWriter
    coordinator: SyncCoordinator
    buffer: TrajectoryGroupBuffer
    lifecycle: GroupLifecycle
    learner: LearnerStep
    clock: StepClock
    abandoned: Abandoned
    """Calls of user code that did not stop in time."""
    releases_cache: bool
    """Whether the engine's cache makes room for the learner."""

    def step_metrics(self) -> dict[str, float]:
        """All metrics of the step that was just made."""
        metrics = self.learner.metrics
        for name, count in asdict(self.coordinator.account()).items():
            metrics.record(f"episodes/{name}", count)
        if self.journal.restarted:
            metrics.record("episodes/restarted", self.journal.restarted)
        if self.abandoned.count:
            metrics.record("user_code/abandoned", self.abandoned.count)
        metrics.merge(self.lifecycle.metrics())
        metrics.record_all(self.manager.metrics())
        health = self.engine.health()
        metrics.record_all(pool_metrics(health))
        metrics.merge(self.clock.end(health, overlapping=self.config.trainer.max_staleness > 0))
        totals = metrics.reduce()
        metrics.record("tokens/generated_per_s", totals["tokens/generated"] / max(self.clock.generating_s, 1e-9))
        metrics.record("tokens/trained_per_s", totals["tokens/trained"] / max(self.clock.training_s, 1e-9))
        return metrics.reduce()

    def state(self, step: int) -> TrainerState:
        """Where the loops stand, for a checkpoint."""
        return TrainerState(
            step=step,
            version=self.coordinator.version,
            sampler_position=self.manager.sampler.position,
            next_group_id=self.lifecycle.next_group_id,
            evaluations=self.evaluations.history,
            unfinished=self.lifecycle.unfinished(),
            random=random_states(),
            extra={
                "policy": self.policy.state(),
                "curriculum": self.manager.sampler.state(),
                "used": self.buffer.used(),
                "untold_evaluation": self.evaluating.unreported,
            },
        )


def batches_left(config: RunConfig, step: int) -> int:
    """Batches that the rest of the run needs."""
    return -(-(config.trainer.steps - step) // config.trainer.updates_per_batch)


@asynccontextmanager
async def open_run(
    config: RunConfig, as_given: RunConfig, given: UserObjects, claim: Claim, stop: StopRequest
) -> AsyncIterator[Run]:
    """Load the model, find where the run stands, and build all that its loops need. Everything is closed at the end,
    in the opposite order, whatever fails."""
    folder = claim.folder
    trackers = TrackerSet.from_names(config.track.trackers)
    async with AsyncExitStack() as held:
        held.enter_context(closing(trackers))
        for note in claim.notes:  # first of all: why the run is in this folder, and what is different in it
            trackers.message(note)
        values = held.enter_context(closing(StoredValues(folder / "store.sqlite")))
        # the folder may be NAME-2: what writes into it beside the trainer must know
        own = config.run.model_copy(update={"dir": folder.parent, "name": folder.name})
        placed = config.model_copy(update={"run": own})
        watch = f"loading {config.model.name} for the run in {folder}; watch it with {own_command()} view {folder}"
        parts = await run_in_thread(
            assemble, placed, given, values, report=trackers.progress, loading=lambda: trackers.message(watch)
        )
        for line in placements(config):
            trackers.message(line)
        held.push_async_callback(lambda: parts.backend.close())
        held.push_async_callback(close_gateway)
        held.push_async_callback(lambda: parts.engine.close())
        held.push_async_callback(end_user_tasks)
        if isinstance(parts.backend, SaysWhere) and (where := parts.backend.where):
            trackers.message(f"the model is on {where}")
        require_same_tasks(claim, parts.sampler.digest())
        journal = held.enter_context(closing(open_journal(folder, config)))
        held.callback(trackers.close)  # before the ledger is closed: the last metrics come first
        loop = parts.new_loop(journal)
        loops = [loop, *parts.evaluator.loops]
        held.push_async_callback(close_all, loops)
        await start_workflows(loops, config.trainer.hook_timeout_s)
        checkpoints = CheckpointWriter(folder, parts.backend, config.trainer, config.eval.sets)
        held.push_async_callback(checkpoints.close)
        abandoned = held.enter_context(reporting_abandoned(trackers.message))
        state = await _announced_state(config, as_given, claim, parts.backend, journal, trackers)
        saving = Saving()
        evaluating = Evaluating(saving, state.extra.get("untold_evaluation") if state else None)
        # tracked before it is saved: what a checkpoint contains is never missing from the metrics
        callbacks = CallbackSet(
            [evaluating, *given.callbacks, Tracking(trackers), saving], config.trainer.hook_timeout_s
        )
        services = _Services(folder, loop, journal, trackers, callbacks, evaluating, checkpoints, abandoned, stop)
        run = _build(config, parts, services, state)
        trackers.progress("syncing the weights to the engine")
        await parts.sync.sync(run.start.version)
        yield run


async def _announced_state(
    config: RunConfig, as_given: RunConfig, claim: Claim, backend: Backend, journal: RunJournal, trackers: TrackerSet
) -> TrainerState | None:
    """The newest checkpoint's state, loaded; the trackers hear where the run starts from."""
    notes: list[str] = []
    trackers.progress("looking for a checkpoint")
    if claim.start_from is not None:
        await asyncio.to_thread(adopt, claim.folder, claim.start_from, notes.append)
    state = await load_newest(claim.folder, backend, notes.append, set_aside=True)
    notes += journal.agree_with(state, branches=claim.start_from is not None and not claim.resumes)
    resumed_from = state.step if state else 0 if claim.resumes or journal.resumes else None
    info = as_given.model_dump(mode="json")
    trackers.start(RunInfo(config.run.name, claim.folder, config.trainer.steps, info, resumed_from))
    if state is not None and "jsonl" in config.track.trackers:
        notes += _missing_metrics(config, claim.folder, journal, state)
    if state is None and resumed_from is not None:
        notes.append(f'resuming the run in {claim.folder}; run.resume = "never" starts another')
    for note in notes:
        trackers.message(note)
    journal.resumed(resumed_from)
    return state


def _missing_metrics(config: RunConfig, folder: Path, journal: RunJournal, state: TrainerState) -> list[str]:
    one_each = config.trainer.updates_per_batch == 1
    expected = range(1, state.step + 1) if one_each else journal.made_steps(state.step)
    return missing_steps(folder, journal.begins_at, state.step, expected or ())


@dataclass(frozen=True, slots=True)
class _Services:
    """What `open_run` opened: folder, ledger, trackers and checkpoints, and what uses them."""

    folder: Path
    loop: AgentLoop
    journal: RunJournal
    trackers: TrackerSet
    callbacks: CallbackSet
    evaluating: Evaluating
    checkpoints: CheckpointWriter
    abandoned: Abandoned
    stop: StopRequest


def _build(config: RunConfig, parts: RunParts, services: _Services, state: TrainerState | None) -> Run:
    """The loops' own parts, new or as ledger and checkpoint have them."""
    section, sampler, policy, engine = config.trainer, parts.sampler, parts.policy, parts.engine
    journal, trackers, callbacks = services.journal, services.trackers, services.callbacks
    buffer = TrajectoryGroupBuffer(config, spill_dir=services.folder / "spill")
    start = find_start(journal, buffer, state)
    left = batches_left(config, start.step)
    coordinator = SyncCoordinator.from_config(
        config, policy, version=start.version, batches=left, account=start.account
    )
    lifecycle = GroupLifecycle(
        config.rollout.group_size, config.algorithm, sampler, coordinator, buffer, journal, start.next_group_id
    )
    resumed = restore_loops(start, journal, sampler, buffer, lifecycle, policy)
    learner = LearnerStep(config, parts.backend, parts.objective, policy)
    shares = parts.sync.in_place or (section.placement == "colocate" and on_servers(config))  # the learner's device
    streams = learner.streams and (not shares if section.stream is None else section.stream)
    releases = section.max_staleness == 0 if section.release_cache is None else section.release_cache
    stopping = services.stop
    manager = AgentLoopManager(
        config, sampler, services.loop, coordinator, buffer, lifecycle, resumed=resumed,
        begun_at=journal.batch_begun_at(), streams=streams, stopping=lambda: stopping.requested,
        report=trackers.message,
    )  # fmt: skip
    history = state.evaluations if state else ()
    evaluations = Evaluations(parts.evaluator, engine, journal, callbacks, trackers.progress, history)
    alarms = Alarms(config.alarm, config.algorithm.roles, samples_as_learned(config), trackers.message)
    return Run(
        config=config, folder=services.folder, start=start, stop=stopping, backend=parts.backend, engine=engine,
        sync=parts.sync, manager=manager, policy=policy, journal=journal, trackers=trackers,
        callbacks=callbacks, evaluating=services.evaluating, evaluations=evaluations,
        alarms=alarms, checkpoints=services.checkpoints, coordinator=coordinator,
        buffer=buffer, lifecycle=lifecycle, learner=learner, clock=StepClock(),
        abandoned=services.abandoned, releases_cache=shares and releases and not streams,
    )  # fmt: skip
