"""A training run on a virtual clock: the very same coordinator, buffer and staleness policy, and nothing that takes time.

Events are a group that becomes whole and a step that is done. Between them, the producer starts what the coordinator
admits and the learner takes what the buffer has, by the trainer's own rules. What is not simulated: learning on the
first groups of a step before the last are there (`trainer.stream`), the forward pass in which `trust` measures old rows,
pauses of the engine while it swaps weights, evaluation, checkpoints; and that groups take longer the more of them run.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.config import RunConfig
from headrace.data.sample import Sample
from headrace.data.seeds import derive_seed
from headrace.errors import ConfigError
from headrace.metrics import MetricsAggregator
from headrace.pipeline.batcher import to_samples
from headrace.pipeline.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.pipeline.coordinator import SyncCoordinator
from headrace.pipeline.durations import Durations, durations_of
from headrace.pipeline.staleness import StalenessPolicy
from headrace.pipeline.tally import Outcome, Tally
from headrace.pipeline.virtual import VirtualGroup, VirtualPolicy, VirtualRollouts, VirtualTasks
from headrace.registry import resolve

_ROUNDING = 1e-9


def simulate(config: RunConfig, durations: Durations | None = None, *, ends: bool = False) -> Outcome:
    """Simulate `simulate.steps` training steps. With `ends`, nothing is started that those steps do not need."""
    check_simulated(config)
    return Simulation(config, durations or durations_of(config), ends=ends).run()


def check_simulated(config: RunConfig) -> None:
    """Raise ConfigError for what a simulation would leave out without a word."""
    section, trainer, produce = config.simulate, config.trainer, config.produce
    if config.algorithm.objective != "rl":
        raise ConfigError(
            f'a simulation is of rollouts that are trained by advantages, got algorithm.objective = '
            f'"{config.algorithm.objective}"; use "rl"'
        )
    if config.filters.min_partial_tasks:
        raise ConfigError("filters.min_partial_tasks is not simulated; remove it, or set it to 0")
    if section.filtered_share and not config.filters.drop_uniform:
        raise ConfigError(
            f"simulate.filtered_share is {section.filtered_share:g}, but nothing filters groups; "
            f"set filters.drop_uniform = true or remove it"
        )
    if (section.warmup or 0) >= section.steps:
        raise ConfigError(
            f"simulate.warmup is {section.warmup} of {section.steps} steps, which leaves none to count; "
            f"lower it or raise simulate.steps"
        )
    if produce.capacity is not None and produce.capacity < config.fresh_groups:
        raise ConfigError(
            f"produce.capacity is {produce.capacity}, and a step of trainer.batch_size {trainer.batch_size} waits for "
            f"{config.fresh_groups} groups: it would never come; raise produce.capacity"
        )


class _Event(NamedTuple):
    """A group that becomes whole or, with None, a training step that is done. Numbered, so that ties have an order."""

    at_s: float
    number: int
    group_id: int | None


class Simulation:
    """One run. `now_s` is the virtual clock."""

    def __init__(self, config: RunConfig, durations: Durations, *, ends: bool = False) -> None:
        section, trainer, produce = config.simulate, config.trainer, config.produce
        self._config = config
        self._durations = durations
        self._steps = section.steps
        self._warmup = section.steps // 4 if section.warmup is None else section.warmup
        self._policy: StalenessPolicy = resolve("staleness", trainer.staleness)(trainer.max_staleness)
        self.coordinator = SyncCoordinator(
            self._policy,
            config.fresh_groups,
            over_sample=produce.over_sample,
            capacity=produce.capacity,
            batches=self._steps if ends else None,
        )
        self.buffer = TrajectoryGroupBuffer(config)
        self._places = max(1, config.rollout.max_concurrent // config.rollout.group_size)
        self._tasks = VirtualTasks(config, durations)
        self._rollouts = VirtualRollouts(section.tokens)
        self._drift = VirtualPolicy(section.drift, config.run.seed)
        self._learn_rng = random.Random(derive_seed("simulate", "learn", config.run.seed))
        self.now_s = 0.0
        self._events: list[_Event] = []
        self._drawn = 0  # tasks of opened batches that have not started
        self._queue: deque[VirtualGroup] = deque()  # started, and waiting for a place to run in
        self._running = 0
        self._groups: dict[int, VirtualGroup] = {}
        self._learning = False
        self._numbers = 0
        self.tally = self._new_tally()

    def _new_tally(self) -> Tally:
        section = self._config.simulate
        return Tally(self.now_s, self._places, section.tokens * self._config.rollout.group_size)

    def run(self) -> Outcome:
        """To the end of the last step."""
        while self.coordinator.version < self._steps:
            self.advance()
        return self.tally.outcome(self.now_s, self.coordinator.account())

    def advance(self) -> None:
        """Everything that can happen now, and then the next event."""
        self._produce()
        if not self._learning:
            self._learn()
        if not self._events:
            raise ConfigError(
                f"nothing can happen any more after {self.coordinator.version} simulated steps: "
                f"{self.coordinator.waiting} groups wait, none runs, and a step needs {self._config.fresh_groups}; "
                f"raise produce.capacity or produce.over_sample"
            )
        event = heapq.heappop(self._events)
        self.tally.time_passed(event.at_s - self.now_s, self._learning, self._running)
        self.now_s = event.at_s
        if event.group_id is None:
            self._learning = False
            self._stepped()
        else:
            self._became_whole(self._groups[event.group_id])

    def _push(self, after_s: float, group_id: int | None) -> None:
        self._numbers += 1
        heapq.heappush(self._events, _Event(self.now_s + after_s, self._numbers, group_id))

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
        self._fill_places()

    def _fill_places(self) -> None:
        while self._queue and self._running < self._places:
            group = self._queue.popleft()
            group.begun_s = self.now_s
            self._running += 1
            self._push(group.seconds, group.group_id)

    def _became_whole(self, group: VirtualGroup) -> None:
        self._running -= 1
        finished = None
        for episode in self._rollouts.episodes(group):
            finished = self.buffer.add_episode(episode, self._config.rollout.group_size)
        assert finished is not None
        self.coordinator.settled(failed=finished.failed, filtered=finished.filtered)
        if finished.dropped_because is None:
            self.coordinator.became_whole(group.group_id, finished.oldest_version)
        else:
            self.coordinator.gone(group.group_id)
            self.tally.group_ended(self._groups.pop(group.group_id), 0)
            self._start()
        self._fill_places()

    # ---- learning -------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Begin a step, if what it needs is there."""
        if self.coordinator.paused:
            self._publish_if_drained()
        if self.coordinator.paused:
            return
        while True:
            self._drop_stale()
            due = self.coordinator.due()
            if len(self.buffer) < self._config.fresh_groups or not all(group_id in self.buffer for group_id in due):
                return
            if self._train(due):
                self._learning = True
                self._push(self._durations.learn_s(self._learn_rng), None)
                return

    def _drop_stale(self) -> None:
        stale = self.coordinator.stale()
        for group in self.buffer.take(len(stale), first=stale):
            self.coordinator.gone(group.group_id)
            self.coordinator.settled(stale=group.kept)
            self.tally.group_ended(self._groups.pop(group.group_id), 0)
            self._start()

    def _train(self, due: Sequence[int]) -> bool:
        """Take the groups of a step; false if nothing of them is to be trained, and there is no step."""
        fresh = self.buffer.take(self._config.fresh_groups, first=due)
        used = self.buffer.take_used(self._config.trainer.batch_size - self._config.fresh_groups, self._is_stale)
        trained = self._limit([*fresh, *used])
        for group in fresh:
            self.coordinator.gone(group.group_id)
            self.tally.group_ended(self._groups[group.group_id], trained.get(group.group_id, 0))
        kept = sum(group.kept for group in fresh)
        if trained:
            self.coordinator.settled(trained=kept)
            self.buffer.retain([*fresh, *used])
        else:
            self.coordinator.settled(filtered=kept)
            self.coordinator.skipped()
        if self._config.produce.reuse == 1 or not trained:
            for group in fresh:
                del self._groups[group.group_id]
        return bool(trained)

    def _is_stale(self, group: FinishedGroup) -> bool:
        oldest = group.oldest_version
        return oldest is not None and self._policy.is_stale(self.coordinator.version - oldest)

    def _limit(self, finished: Sequence[FinishedGroup]) -> dict[int, int]:
        """Have the policy look at the rows of a step; trained tokens by group."""
        policy, version = self._policy, self.coordinator.version
        samples = to_samples([group for item in finished for group in item.groups])
        age_BT = version - np.array([sample.versions for sample in samples])
        asked = policy.to_measure(samples, version)
        learner_BT = self._learner_logprobs(samples, age_BT, bool(asked))
        metrics = MetricsAggregator()
        limited = policy.limit(samples, version, {i: learner_BT[i].tolist() for i in asked}, metrics)
        assert len(limited) == len(samples), "a staleness policy masks tokens; it does not leave rows out"
        mask_BT = np.array([sample.loss_mask for sample in limited], dtype=bool)
        self.tally.rows_trained(age_BT, mask_BT, policy.max_staleness, len(asked))
        bound = metrics.reduce().get("staleness/divergence_bound")
        if bound is not None:
            moved_BT = np.where(mask_BT, (learner_BT - np.array([sample.logprobs for sample in samples])) ** 2 / 2, 0)
            mean_B = moved_BT.sum(axis=1) / np.maximum(mask_BT.sum(axis=1), 1)
            self.tally.rows_too_far += int((mean_B[asked] > bound * (1 + _ROUNDING)).sum())
        rows = [(sample, row) for sample, row in zip(limited, range(len(limited)), strict=True) if mask_BT[row].any()]
        policy.observe([s for s, _ in rows], [learner_BT[i][mask_BT[i]].tolist() for _, i in rows], version)
        trained: dict[int, int] = {}
        for sample, count in zip(limited, mask_BT.sum(axis=1).tolist(), strict=True):
            if count:
                trained[sample.group_id] = trained.get(sample.group_id, 0) + count
        return trained

    def _learner_logprobs(self, samples: Sequence[Sample], age_BT: np.ndarray, asked: bool) -> np.ndarray:
        observes = type(self._policy).observe is not StalenessPolicy.observe
        if not asked and not observes:
            return np.zeros_like(age_BT, dtype=float)
        factors = (self._groups[sample.group_id].factor for sample in samples)
        return self._drift.logprobs(samples, age_BT, factors)

    def _stepped(self) -> None:
        """A step is done: publish its weights, at once or after what runs has finished."""
        if not self._config.trainer.partial_rollouts:
            self.coordinator.pause()
            self._publish_if_drained()
        else:
            self._publish()

    def _publish_if_drained(self) -> None:
        if self.coordinator.in_flight == 0:
            self._publish()
            self.coordinator.resume()

    def _publish(self) -> None:
        self.coordinator.published(self.coordinator.version + 1)
        self._rollouts.published(self.now_s)
        self.tally.steps += 1
        if self.coordinator.version == self._warmup:
            self.tally = self._new_tally()
