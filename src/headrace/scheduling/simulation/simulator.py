"""A training run on a virtual clock: the trainer's coordinator, buffer and staleness policy, without a model.

Events are a group that is complete, a piece of a step that is learned, weights that are synced, and nodes that are lost
and replaced. Between events, the producer starts what the coordinator admits, and the learner takes what the buffer
has, by the trainer's rules. Not simulated: the forward
pass in which `trust` scores old rows, the engine's pauses for weight syncs, evaluation and checkpoints. The episodes of
a group end together, and a group takes equally long however many others run.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.algorithms.batching import to_samples
from headrace.config import RunConfig, WorkflowSection
from headrace.config.derived import group_by_group
from headrace.data.sample import Sample
from headrace.data.seeds import derive_seed
from headrace.errors import ConfigError
from headrace.registry import resolve
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.durations import Durations, durations_of
from headrace.scheduling.selection import Selection
from headrace.scheduling.simulation.fleet import Fleet, sync_seconds
from headrace.scheduling.simulation.tally import Outcome, Tally
from headrace.scheduling.simulation.virtual import VirtualGroup, VirtualPolicy, VirtualRollouts, VirtualTasks
from headrace.scheduling.staleness import StalenessPolicy
from headrace.tracking.metrics import MetricsAggregator

_ROUNDING = 1e-9
_MOST_LOSSES = 1000
"""Of each node, on average, within one step: more, and no step will ever end."""


def simulate(config: RunConfig, durations: Durations | None = None, *, ends: bool = False) -> Outcome:
    """Simulate `simulate.steps` training steps. With `ends`, only groups that those steps need are started."""
    check_simulated(config)
    return Simulation(config, durations or durations_of(config), ends=ends).run()


def check_simulated(config: RunConfig) -> None:
    """Raise ConfigError for settings that a simulation would silently ignore."""
    section = config.simulate
    if config.algorithm.objective != "rl":
        raise ConfigError(
            f"a simulation is of rollouts that are trained by advantages, got algorithm.objective = "
            f'"{config.algorithm.objective}"; use "rl"'
        )
    if config.filters.min_partial_tasks:
        raise ConfigError("filters.min_partial_tasks is not simulated; remove it, or set it to 0")
    if (section.warmup or 0) >= section.steps:
        raise ConfigError(
            f"simulate.warmup is {section.warmup} of {section.steps} steps, which leaves none to count; "
            f"lower it or raise simulate.steps"
        )


_GROUP, _LEARNED, _SYNCED, _LOST, _BACK = range(5)


class _Event(NamedTuple):
    """Something that happens: a group is complete, a piece of a step learned, weights synced, a node lost or back.

    Numbered, so that ties have an order. `about` is the group, or the node; `start` which start of the group it ends.
    """

    at_s: float
    number: int
    what: int
    about: int = -1
    start: int = 0


class Simulation:
    """One run. `now_s` is the virtual clock."""

    def __init__(self, config: RunConfig, durations: Durations, *, ends: bool = False) -> None:
        section, trainer = config.simulate, config.trainer
        self._config = config
        self._durations = durations
        self._steps = section.steps
        self._warmup = section.steps // 4 if section.warmup is None else section.warmup
        self._policy: StalenessPolicy = resolve("staleness", trainer.staleness)(trainer.max_staleness)
        self.coordinator = SyncCoordinator.from_config(config, self._policy, batches=self._steps if ends else None)
        by_role = config.model_copy(update={"workflow": WorkflowSection()})  # virtual episodes are no hook's
        self.buffer = TrajectoryGroupBuffer(by_role)
        self._slots = max(1, config.rollout.max_concurrent // config.rollout.group_size)
        self._tasks = VirtualTasks(config, durations)
        self._rollouts = VirtualRollouts(section.tokens)
        self._drift = VirtualPolicy(section.drift, config.run.seed)
        self._learn_rng = random.Random(derive_seed("simulate", "learn", config.run.seed))
        self.now_s = 0.0
        self._events: list[_Event] = []
        self._numbers = 0
        rng = random.Random(derive_seed("simulate", "fleet", config.run.seed))
        self._fleet = Fleet(section.fleet, self._slots, rng)
        self._sync_s = sync_seconds(section.fleet)
        self._losses = self._fleet.losses()
        self._lost = 0  # nodes since the last step, also those that were down already
        self._next_loss()
        self._learner_back_s = 0.0
        self._saved_s = 0.0  # when the last checkpoint was saved, and what was learned since
        self._learned_s = 0.0
        self._drawn = 0  # tasks of opened batches that have not started
        self._queue: deque[VirtualGroup] = deque()  # started, and waiting for a free slot
        self._running = 0
        self._groups: dict[int, VirtualGroup] = {}
        stream = trainer.stream if trainer.stream is not None else trainer.placement == "separate"
        streams = stream and trainer.updates_per_batch == 1 and group_by_group(config.algorithm)
        self._selection = Selection(self.coordinator, self.buffer, streams, in_order=config.run.deterministic)
        self._learning = self._syncing = False
        self._step: list[FinishedGroup] = []
        self._again: list[FinishedGroup] = []
        self._begin_step()
        self.tally = self._new_tally()

    def _new_tally(self) -> Tally:
        tokens = self._config.simulate.tokens * self._config.rollout.group_size
        return Tally(self.now_s, self.coordinator.version, self._slots, tokens)

    def run(self) -> Outcome:
        """Run to the end of the last step."""
        while self.coordinator.version < self._steps:
            self.advance()
        return self.tally.outcome(self.now_s, self.coordinator.account(), self._config.simulate.fleet)

    def advance(self) -> None:
        """Do everything that can happen now, then process the next event."""
        self._produce()
        self._learn()
        self._produce()  # the learner has made room
        if all(event.what == _LOST for event in self._events):
            raise ConfigError(
                f"nothing can happen any more after {self.coordinator.version} simulated steps: "
                f"{self.coordinator.waiting} groups wait, none runs, and a step needs {self._size}; "
                f"raise produce.capacity or produce.over_sample"
            )
        event = heapq.heappop(self._events)
        self.tally.time_passed(event.at_s - self.now_s, self._learning, min(self._running, self._slots))
        self.now_s = event.at_s
        self._handle(event)

    def _handle(self, event: _Event) -> None:
        if event.what == _LEARNED:
            self._piece_learned()
        elif event.what == _SYNCED:
            self._sync_weights()
        elif event.what == _LOST:
            self._node_lost(event.about)
            self._next_loss()
        elif event.what == _BACK:
            self._fleet.replace(event.about)
            self._fill_slots()
        elif (group := self._groups.get(event.about)) is not None and group.starts == event.start:
            self._group_completed(group)

    def _push(self, after_s: float, what: int, about: int = -1, start: int = 0) -> None:
        self._numbers += 1
        heapq.heappush(self._events, _Event(self.now_s + after_s, self._numbers, what, about, start))

    # ---- losses ---------------------------------------------------------------------------------------------------

    def _next_loss(self) -> None:
        found = next(self._losses, None)
        if found is not None:
            self._push(found[0], _LOST, found[1])

    def _node_lost(self, node: int) -> None:
        fleet = self._config.simulate.fleet
        self._require_steps()
        if node >= fleet.engines:  # of the learner: rebuilt from the checkpoint, and recorded steps repeated
            self.tally.lost_nodes += 1
            self._learner_back_s = self.now_s + fleet.recovery_s + self._learned_s
        elif self._fleet.is_up(node):
            self.tally.lost_nodes += 1
            for group_id in reversed(self._fleet.lose(node)):
                group = self._groups[group_id]
                self.tally.lost_s += self.now_s - group.begun_s
                self._running -= 1
                self._queue.appendleft(group)  # its requests are issued again, before new ones
                group.starts += 1
            self._push(fleet.recovery_s, _BACK, node)
            self._fill_slots()

    def _require_steps(self) -> None:
        """Raise ConfigError if nodes are lost faster than anything can be done."""
        fleet = self._config.simulate.fleet
        self._lost += 1
        if self._lost > _MOST_LOSSES * (fleet.engines + fleet.learners):
            raise ConfigError(
                f"no step ends any more after {self.coordinator.version} simulated steps: with simulate.fleet.mtbf_h = "
                f"{fleet.mtbf_h:g} and recovery_s = {fleet.recovery_s:g} every node was lost {_MOST_LOSSES} times "
                f"since; raise simulate.fleet.mtbf_h, lower recovery_s, or save more often (trainer.save_every)"
            )

    # ---- generation -----------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        """Open batches and start their groups, as far as the coordinator admits."""
        while True:
            if not self._drawn:
                if not self.coordinator.may_open_batch():
                    return
                self.coordinator.open_batch()
                self._drawn = self._config.fresh_groups
            while self._drawn:
                if not self.coordinator.may_start():
                    return
                self._drawn -= 1
                self._start()

    def _start(self) -> None:
        group = self._tasks.draw()
        self._groups[group.group_id] = group
        self.coordinator.started(group.group_id, self._config.rollout.group_size)
        self.tally.group_submitted(group)
        self._queue.append(group)
        self._fill_slots()

    def _fill_slots(self) -> None:
        while self._queue:
            group = self._queue[0]
            if not self._durations.include_queueing:
                engine = self._fleet.take(group.group_id)
                if engine is None:
                    return
                group.engine = engine
            self._queue.popleft()
            group.begun_s = self.now_s
            self._running += 1
            self._push(group.seconds, _GROUP, group.group_id, group.starts)

    def _group_completed(self, group: VirtualGroup) -> None:
        self._running -= 1
        if group.engine >= 0:
            self._fleet.release(group.engine, group.group_id)
        finished = None
        for episode in self._rollouts.episodes(group):
            finished = self.buffer.add_episode(episode, self._config.rollout.group_size)
        assert finished is not None
        self.coordinator.settled(failed=finished.failed, filtered=finished.filtered)
        if finished.dropped_because is None:
            self.coordinator.completed(group.group_id, finished.oldest_version)
        else:
            self.coordinator.discarded(group.group_id)
            self.tally.group_ended(self._groups.pop(group.group_id), 0)
            self._start()
        self._fill_slots()

    # ---- learning -------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Start a step or, when streaming, continue it, if its groups are complete."""
        if self.coordinator.paused:
            self._sync_if_drained()
        while not self._learning and not self._syncing and not self.coordinator.paused:
            wanted = self._size - len(self._step)
            self._drop_stale()
            count, first = self._selection.takeable(wanted)
            if not count and not self._selection.has_enough(wanted):
                return
            self._learn_from(self.buffer.take(count, first))

    def _drop_stale(self) -> None:
        stale = self.coordinator.stale()
        for group in self.buffer.take(len(stale), first=stale) if stale else ():
            self.coordinator.discarded(group.group_id)
            self.coordinator.settled(stale=group.kept)
            self.tally.group_ended(self._groups.pop(group.group_id), 0)
            self._start()

    def _learn_from(self, piece: list[FinishedGroup]) -> None:
        """Learn from some groups of a step; with the last of them, from reused groups too."""
        for group in piece:
            self.coordinator.taken(group.group_id)
        self._step += piece
        self._complete = len(self._step) >= self._size and not self.coordinator.due()
        again = self._config.trainer.batch_size - len(self._step) if self._complete else 0
        self._again = self.buffer.take_used(again, self._selection.is_too_old) if again > 0 else []
        trained = self._limit([*piece, *self._again])
        for group in piece:
            self.tally.group_ended(self._groups[group.group_id], trained.get(group.group_id, 0))
        self.tally.groups += len(piece)
        self._has_something |= bool(trained)
        if self._complete and not self._has_something:
            self._skip()
            return
        share = (len(piece) + len(self._again)) / self._config.trainer.batch_size
        self._learning = True
        self._learned_s += share * self._learn_s
        self._push(max(self._learner_back_s - self.now_s, 0.0) + share * self._learn_s, _LEARNED)

    def _skip(self) -> None:
        """Nothing of the step can be trained: no update, and another batch instead."""
        self.coordinator.settled(filtered=sum(group.kept for group in self._step))
        self.coordinator.skipped()
        self._begin_step()

    def _begin_step(self) -> None:
        for group in (*self._step, *self._again):
            if group.group_id not in self.buffer.reusable:
                del self._groups[group.group_id]
        self._step, self._again = [], []
        self._complete = self._has_something = False
        fresh, asked = self._config.fresh_groups, self._config.trainer.batch_size
        self._size = max(fresh, asked - self.buffer.usable(self._selection.is_too_old))  # a batch is full
        self.coordinator.enlarge(self._size - fresh)
        self._learn_s = self._durations.learn_s(self._learn_rng)

    def _piece_learned(self) -> None:
        """A piece is learned; after the last, sync the weights, immediately or when all running groups are done."""
        if self._learner_back_s > self.now_s:  # its node was lost meanwhile: it is learned again
            self._push(self._learner_back_s - self.now_s, _LEARNED)
            return
        self._learning = False
        if not self._complete:
            return
        if self._config.trainer.partial_rollouts:
            self._begin_sync()
        else:
            self.coordinator.pause()
            self._sync_if_drained()

    def _sync_if_drained(self) -> None:
        if self.coordinator.in_flight == 0 and not self._syncing:
            self._begin_sync()

    def _begin_sync(self) -> None:
        """The learner is idle until all engines have the weights."""
        self._syncing = True
        if self._sync_s:
            self._push(self._sync_s, _SYNCED)
        else:
            self._sync_weights()

    def _sync_weights(self) -> None:
        self._syncing, self._lost = False, 0
        self.coordinator.settled(trained=sum(group.kept for group in self._step))
        self.coordinator.synced(self.coordinator.version + 1)
        trainer = self._config.trainer
        due = trainer.save_every and self.coordinator.version % trainer.save_every == 0
        if due or (trainer.save_every_s and self.now_s - self._saved_s >= trainer.save_every_s):
            self._saved_s, self._learned_s = self.now_s, 0.0
        self.buffer.retain([*self._step, *self._again])
        self._rollouts.synced(self.now_s)
        self._begin_step()
        self.tally.steps += 1
        if self.coordinator.version == self._warmup:
            self.tally = self._new_tally()
        if self.coordinator.paused:
            self.coordinator.resume()

    # ---- the rows of a step ---------------------------------------------------------------------------------------

    def _limit(self, finished: Sequence[FinishedGroup]) -> dict[int, int]:
        """Apply the staleness policy to the rows of some groups. Returns the number of trained tokens by group."""
        policy, version = self._policy, self.coordinator.version
        samples = to_samples([group for item in finished for group in item.groups])
        if not samples:  # a step that waited for due groups only, and needed none of them
            return {}
        age_BT = version - np.array([sample.versions for sample in samples])
        asked = policy.to_measure(samples, version)
        learner_BT = self._learner_logprobs(samples, age_BT, bool(asked))
        metrics = MetricsAggregator()
        limited = policy.limit(samples, version, {i: learner_BT[i].tolist() for i in asked}, metrics)
        assert len(limited) == len(samples), "a staleness policy masks tokens; it does not remove rows"
        mask_BT = np.array([sample.loss_mask for sample in limited], dtype=bool)
        self.tally.rows_trained(age_BT, mask_BT, policy.max_staleness, len(asked))
        bound = metrics.reduce().get("staleness/divergence_bound")
        if bound is not None:
            gap_BT = learner_BT - np.array([sample.logprobs for sample in samples])
            self.tally.rows_too_far += _rows_beyond(bound, gap_BT[asked], mask_BT[asked])
        rows = np.flatnonzero(mask_BT.any(axis=1)).tolist()
        policy.observe([limited[i] for i in rows], [learner_BT[i][mask_BT[i]].tolist() for i in rows], version)
        trained: Counter[int] = Counter()
        for i in rows:
            trained[limited[i].group_id] += limited[i].trained_tokens
        return trained

    def _learner_logprobs(self, samples: Sequence[Sample], age_BT: np.ndarray, asked: bool) -> np.ndarray:
        observes = type(self._policy).observe is not StalenessPolicy.observe
        if not asked and not observes:
            return np.zeros_like(age_BT, dtype=float)
        factors = (self._groups[sample.group_id].factor for sample in samples)
        return self._drift.logprobs(samples, age_BT, factors)


def _rows_beyond(bound: float, gap_BT: np.ndarray, mask_BT: np.ndarray) -> int:
    """Rows whose trained tokens diverge by more than the bound on average (k2, as in the policies)."""
    moved_B = np.where(mask_BT, gap_BT**2 / 2, 0.0).sum(axis=1) / np.maximum(mask_BT.sum(axis=1), 1)
    return int((moved_B > bound * (1 + _ROUNDING)).sum())
