"""AgentLoopManager: from tasks to complete groups. Its members are a sampler, an agent loop and a produce strategy.

The trainer drives it step by step (`run`, `next_batch`, `gather`). Without a trainer, `produce` returns one batch of
groups after another, and `roll_out` the episodes of given tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Self

from headrace.config import AgentLoopConfig, AlgorithmSection
from headrace.config.derived import cut_problem
from headrace.data.episode import Episode
from headrace.data.sampler import Position, TaskSampler
from headrace.data.seeds import derive_seed
from headrace.data.task import Task
from headrace.data.training import load_training, make_sampler, warn_of_bad_rows
from headrace.engines.base import RolloutEngine
from headrace.errors import first_of
from headrace.judge.base import Judger
from headrace.judge.router import configured_judger
from headrace.registry import facts, resolve
from headrace.rollout.agent_loop import AgentLoop, close_all, local_loop, sampling_of, start_workflows
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.gateway import close_gateway
from headrace.rollout.gateway import configure as configure_gateway
from headrace.rollout.model_client import CutProblem
from headrace.rollout.store import Values
from headrace.rollout.workflow import RunFunction, demonstration, run_function
from headrace.run.journal import RunJournal
from headrace.scheduling.batch_source import BatchSource
from headrace.scheduling.buffer import FinishedGroup, TrajectoryGroupBuffer
from headrace.scheduling.coordinator import SyncCoordinator
from headrace.scheduling.lifecycle import GroupLifecycle, LiveGroup
from headrace.scheduling.producer import OpenedBatch, Producer
from headrace.weights.base import SyncedWeights

log = logging.getLogger("headrace")


class AgentLoopManager:
    """Draws tasks, rolls them out as the coordinator admits them, and collects complete groups."""

    def __init__(
        self,
        config: AgentLoopConfig,
        sampler: TaskSampler,
        loop: AgentLoop,
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
        lifecycle: GroupLifecycle,
        *,
        resumed: Sequence[LiveGroup] = (),
        begun_at: Position | None = None,
        streams: bool = False,
        stopping: Callable[[], bool] = lambda: False,
        report: Callable[[str], None] = log.info,
    ) -> None:
        """`resumed` and `begun_at` are what an interrupted run left (see `Producer`). Where a step `streams`, it takes
        groups as they become complete."""
        self.sampler = sampler
        self.loop = loop
        self._config = config
        self._lifecycle = lifecycle
        self._producer = Producer(config, sampler, loop, coordinator, lifecycle, resumed, begun_at)
        self._batches = BatchSource(config, coordinator, buffer, lifecycle, self._producer, streams, stopping, report)
        self._producing: asyncio.Task[None] | None = None
        self._fresh: list[FinishedGroup] = []
        self._again: list[FinishedGroup] = []
        self._produced = 0

    @classmethod
    def from_config(
        cls, config: AgentLoopConfig, engine: RolloutEngine, tokenizer: Any, *, workflow: Any = None,
        judger: Any = None, tasks: Iterable[Task | dict[str, Any]] | None = None, training: bool = True,
    ) -> AgentLoopManager:  # fmt: skip
        """The manager that a config describes. Workflow, judger and tasks may be given as objects instead of names.

        With `training` false the episodes are evaluation episodes: `model.training` is false in the workflow.
        """
        configure_gateway(config.gateway)
        run = run_function(config.workflow, workflow)
        judge = configured_judger(config, judger)
        data = load_training(config.data, tasks)
        warn_of_bad_rows(data, "the training tasks")
        sampler = make_sampler(config.data, config.fresh_groups, config.run.seed, data)
        loop = training_loop(config, run, judge, engine, ChatTemplate(tokenizer), training=training)
        policy = resolve("staleness", config.trainer.staleness)(config.trainer.max_staleness)
        coordinator = SyncCoordinator.from_config(config, policy)
        buffer = TrajectoryGroupBuffer(config)
        size, algorithm = config.rollout.group_size, config.algorithm
        lifecycle = GroupLifecycle(size, algorithm, sampler, coordinator, buffer, RunJournal())
        return cls(config, sampler, loop, coordinator, buffer, lifecycle)

    # ---- for the trainer's loops ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Open batches and start their groups, for ever."""
        await self._producer.run()

    async def next_batch(self) -> OpenedBatch:
        """The next batch that was opened."""
        return await self._batches.next_batch()

    def gather(self, size: int, step: int) -> AsyncGenerator[tuple[list[FinishedGroup], list[FinishedGroup]], None]:
        """The groups of a step, all at once or in pieces; with the last, those that are trained once more."""
        return self._batches.gather(size, step)

    def metrics(self) -> dict[str, float]:
        """Of the sampler and of judging."""
        return self.sampler.metrics() | self.loop.metrics()

    # ---- without a trainer ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await start_workflows([self.loop], self._config.trainer.hook_timeout_s)
        except BaseException:
            await self.__aexit__()
            raise
        self._producing = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._producing is not None:
            self._producing.cancel()
            await asyncio.gather(self._producing, return_exceptions=True)
        await close_all([self.loop])
        await close_gateway()

    async def produce(self) -> list[FinishedGroup]:
        """The complete groups of one more batch (`trainer.batch_size` of them), inside `async with`.

        Call `synced` when the engine has new weights. Otherwise the next batch has the same version.
        """
        assert self._producing is not None, "produce works inside `async with manager`"
        if self._fresh:
            self._lifecycle.delivered(self._fresh, self._again)
        gathering = asyncio.create_task(self._gather_batch())
        try:
            await asyncio.wait((gathering, self._producing), return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():  # nothing more will be produced: why?
                await self._producing
            return await gathering
        except BaseExceptionGroup as group:
            raise first_of(group) from None
        finally:
            gathering.cancel()

    async def _gather_batch(self) -> list[FinishedGroup]:
        batch = await self.next_batch()
        pieces = [piece async for piece in self.gather(batch.size, self._produced)]
        self._fresh = [group for fresh, _ in pieces for group in fresh]
        self._again = [group for _, again in pieces for group in again]
        self._produced += 1
        return [*self._fresh, *self._again]

    def synced(self, version: int) -> None:
        """The batch of the last `produce` is trained, and the engine has the weights as `version`."""
        self._lifecycle.trained(self._fresh, self._again, self._produced - 1, 1, SyncedWeights(version, ""))
        self._fresh, self._again = [], []

    async def roll_out(self, tasks: Sequence[Task], count: int | None = None) -> list[list[Episode]]:
        """Every one of these tasks, `count` times (empty: `rollout.group_size`), in order. Nothing is filtered."""
        rollout, seed = self._config.rollout, derive_seed("eval", self._config.run.seed)
        return await self.loop.roll_out_tasks(tasks, count or rollout.group_size, seed, sampling_of(rollout))


def training_loop(
    config: AgentLoopConfig,
    run: RunFunction,
    judge: Judger | None,
    engine: RolloutEngine,
    chat: ChatTemplate,
    *,
    training: bool = True,
    journal: RunJournal | None = None,
    values: Values | None = None,
) -> AgentLoop:
    """The loop whose episodes are trained. Supervised training reads demonstrations, which nobody judges."""
    if config.algorithm.objective == "sft":
        run, judge = demonstration, None
    return local_loop(
        config.rollout, run, judge, engine, chat, training=training,
        needs_reward=needs_reward(config.algorithm), journal=journal, values=values,
        cut_problem=cut_problem_of_role(config.algorithm),
    )  # fmt: skip


def needs_reward(algorithm: AlgorithmSection) -> Callable[[str], bool]:
    """Which roles are trained by reward: those that are trained, and not by a teacher."""

    def by_reward(role: str) -> bool:
        own = algorithm.for_role(role)
        return algorithm.trains(role) and not facts("estimator", own.estimator).needs_teacher

    return by_reward


def cut_problem_of_role(algorithm: AlgorithmSection) -> CutProblem:
    """Why a call of a workflow must not set top_p or top_k, by role."""
    return lambda role: cut_problem(algorithm.for_role(role)) if algorithm.trains(role) else None
