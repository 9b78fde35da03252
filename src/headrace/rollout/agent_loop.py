"""AgentLoop: runs a workflow over tasks, for training and for evaluation."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from headrace.config import AgentConfig, RolloutSection
from headrace.data.episode import Episode, TerminationReason, Trajectory
from headrace.data.seeds import derive_seed
from headrace.data.task import Message, Task
from headrace.engines.base import EvaluationView, Generates, RolloutEngine, SamplingParams, of_conversation
from headrace.errors import (
    DeadlineError,
    EngineError,
    HeadraceError,
    LedgerError,
    PromptTooLongError,
    WorkflowError,
    first_of,
    is_infrastructure,
)
from headrace.judge.base import JudgeError, Judger, Verdict, ends_the_run
from headrace.judge.router import GuardedJudger, configured_judger
from headrace.ledger.episode_record import AttemptRecord
from headrace.rollout.budget import Budget
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.gateway import configure as configure_gateway
from headrace.rollout.model_client import CutProblem, Model, no_cut_problem
from headrace.rollout.outcome import RolloutSpec, failed_episode, to_episode
from headrace.rollout.store import Values, ValuesInMemory
from headrace.rollout.workflow import RunFunction, limit_met, run_function, until_no_room
from headrace.run.journal import RunJournal
from headrace.utils.deadline import Call, call_user
from headrace.utils.usercode import reason_of, where_it_failed

log = logging.getLogger("headrace")

_PAUSE_S = 0.25  # doubled before each retry
_CLOSE_S = 60.0  # for a workflow or judger to give back what it holds


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds episodes: how many at once, for how long, with what budget, and how often one is tried again."""

    max_concurrent: int = 256
    timeout_s: float = 600.0
    budget: Budget = field(default_factory=Budget)
    retries: int = 2

    @classmethod
    def from_section(cls, section: RolloutSection) -> Limits:
        """As `[rollout]` sets them."""
        budget = Budget(section.max_turns, section.max_episode_tokens, section.max_tool_calls)
        return cls(section.max_concurrent, section.timeout_s, budget, section.retries)


class AgentLoop:
    """Rolls tasks out, so many at once as the limits allow. A failure in user code fails that episode only."""

    def __init__(
        self,
        run: RunFunction,
        engine: Generates,
        chat: ChatTemplate,
        judger: Judger | None,
        limits: Limits | None = None,
        needs_reward: Callable[[str], bool] = lambda role: True,
        training: bool = True,
        journal: RunJournal | None = None,
        values: Values | None = None,
        new_model: Callable[..., Model] = Model,
        cut_problem: CutProblem = no_cut_problem,
    ) -> None:
        self._run = run
        self._new_model = new_model
        self._engine = engine
        self._chat = chat
        self._judger = judger
        self._limits = limits = limits or Limits()
        self._needs_reward = needs_reward
        self._training = training
        self._cut_problem = cut_problem if training else no_cut_problem
        self._journal = journal or RunJournal()
        self._values = values or ValuesInMemory()  # what episodes remember for each other
        self._slots = asyncio.Semaphore(limits.max_concurrent)

    @classmethod
    def from_config(
        cls, config: AgentConfig, engine: RolloutEngine, tokenizer: Any, *, workflow: Any = None, judger: Any = None,
        training: bool = True,
    ) -> AgentLoop:  # fmt: skip
        """The loop that a config describes. Workflow and judger may be given as objects instead of names."""
        configure_gateway(config.gateway)
        run = run_function(config.workflow, workflow)
        judge = configured_judger(config, judger)
        return local_loop(config.rollout, run, judge, engine, ChatTemplate(tokenizer), training=training)

    async def roll_out_tasks(
        self, tasks: Sequence[Task], count: int, seed: int, sampling: SamplingParams,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[list[Episode]]:  # fmt: skip
        """`count` rollouts of every task, in order, failed ones included: what an evaluation is made of."""
        async with asyncio.TaskGroup() as group:
            running = [
                # group_id is the task's index: every evaluation draws the same random numbers
                group.create_task(self.roll_out_group(task, index, count, seed, sampling, on_episode))
                for index, task in enumerate(tasks)
            ]
        return [task.result() for task in running]

    async def roll_out_group(
        self, task: Task, group_id: int, count: int, seed: int, sampling: SamplingParams,
        on_episode: Callable[[Episode], None] | None = None, known: Mapping[int, Episode] = MappingProxyType({}),
    ) -> list[Episode]:  # fmt: skip
        """`count` rollouts of one task. Their seeds depend on (seed, group_id, rollout_idx) only.

        `known` holds episodes that were rolled out before a crash.
        """

        async def one(index: int) -> Episode:
            spec = RolloutSpec(task, group_id, index, derive_seed(seed, group_id, index))
            episode = known[index] if index in known else await self.roll_out(spec, sampling)
            if on_episode is not None:
                on_episode(episode)
            return episode

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(count)]
        return [task.result() for task in tasks]

    async def roll_out(self, spec: RolloutSpec, sampling: SamplingParams) -> Episode:
        """One episode, judged. User failures and time-outs come back as failed episodes; engine failures are raised.

        A prompt that outgrows the model ends the episode; it has failed only if nothing was said before.
        """
        async with self._slots:
            record = self._journal.open(spec.group_id, spec.rollout_idx, spec.seed)
            retries = 0
            while True:
                episode, broke = await self._attempt(spec, sampling, record)
                if record.diverged or record.unused:
                    why = "the workflow did not do again what it did before the crash"
                elif broke and retries < self._limits.retries:
                    why, retries = str(episode.error), retries + 1
                    await asyncio.sleep(_PAUSE_S * 2**retries)
                else:
                    break
                log.warning("the episode of task %s is restarted: %s", spec.task.id, why)
                record = self._journal.restart(record)
            if episode.attempt != record.attempt:
                episode = replace(episode, attempt=record.attempt)
            record.finished(episode)
            return episode

    def metrics(self) -> dict[str, float]:
        """How judging goes: calls that failed, and the seconds of one."""
        judger = self._judger
        if not isinstance(judger, GuardedJudger):
            return {}
        took_s = {"time/judge_s": judger.time_s / judger.judged} if judger.judged else {}
        return {"judge/failed": float(judger.failed), **took_s}

    @property
    def workflow(self) -> Any:
        """The object whose `run` the episodes are; None if it is a function."""
        return getattr(self._run, "__self__", None)

    @property
    def judger(self) -> Judger | None:
        """Who scores the episodes."""
        return self._judger

    async def _attempt(
        self, spec: RolloutSpec, sampling: SamplingParams, record: AttemptRecord
    ) -> tuple[Episode, bool]:
        """The episode, and whether it failed for a reason that may be gone at the next attempt."""
        values = self._values if self._training else ValuesInMemory(self._values)
        engine = of_conversation(self._engine, f"group {spec.group_id}")  # siblings share their prompt's cache
        model = self._new_model(
            engine, self._chat, sampling, spec.seed, self._training, record, self._limits.budget, values,
            self._cut_problem,
        )  # fmt: skip
        call = Call("the workflow", self._limits.timeout_s)
        model.give_up = call.expire
        try:
            return await call.run(lambda: self._episode(spec, model)), False
        except Exception as error:
            _raise_if_not_the_users(model.failure or error)
            if call.late:
                late = f"took longer than {self._limits.timeout_s:g} s"
                return failed_episode(spec, model, TerminationReason.TIMEOUT, late), False
            # user code: the episode fails, its siblings and the run continue
            reason = limit_met(error) or TerminationReason.ERROR
            again = not (isinstance(error, JudgeError) and error.tried_again)
            if isinstance(error, JudgeError):
                reason, error = TerminationReason.JUDGE, error.__cause__ or error
            error = first_of(error)  # of a TaskGroup in the workflow
            if not record.diverged:
                log.warning("episode of task %s failed: %s", spec.task.id, where_it_failed(error))
            return failed_episode(spec, model, reason, reason_of(error)), again and is_infrastructure(error)
        finally:
            model.end()

    async def _episode(self, spec: RolloutSpec, model: Model) -> Episode:
        """What user code makes of the task: workflow and judger."""
        own = copy.deepcopy(spec.task)  # a workflow that changes its task changes no sibling's
        outcome = await until_no_room(self._run, own, model)
        if model.failure is not None:  # which the workflow has caught
            raise model.failure
        return await self._judge(spec.task, to_episode(outcome, model, spec), model)

    async def _judge(self, task: Task, episode: Episode, model: Model) -> Episode:
        if episode.failed:
            return episode
        _require_finite_rewards(episode)
        if all(t.final_reward is not None for t in episode.trajectories):
            return episode
        if self._judger is None and not self._lacks_reward(episode):
            return episode
        if self._judger is None:
            cut = episode.termination == TerminationReason.LENGTH
            raise WorkflowError(
                "the workflow returned no reward and the run has no judger; return a number or set workflow.judger"
                + ("; where a prompt may outgrow the model, the workflow can catch PromptTooLongError" if cut else "")
            )
        verdict = await self._verdict(self._judger, task, episode, model)
        if not math.isfinite(verdict.reward):
            raise WorkflowError(f"the judger gave the reward {verdict.reward}; a reward must be a finite number")
        trajectories = tuple(
            replace(t, reward=verdict.reward if t.final_reward is None else t.final_reward)
            for t in episode.trajectories
        )
        correct = episode.is_correct if episode.is_correct is not None else verdict.is_correct
        return replace(
            episode, trajectories=trajectories, is_correct=correct, metrics={**episode.metrics, **verdict.metrics}
        )

    async def _verdict(self, judger: Judger, task: Task, episode: Episode, model: Model) -> Verdict:
        async def judge() -> Any:
            try:
                verdict = await judger.judge(task, episode)
            except Exception as error:
                if isinstance(error, JudgeError) or ends_the_run(error):
                    raise
                raise JudgeError(reason_of(error)) from error
            correct = None if verdict.is_correct is None else bool(verdict.is_correct)
            return [verdict.reward, correct, {name: float(value) for name, value in verdict.metrics.items()}]

        return Verdict(*await model.recorded("judger", judger.label, [task.id, episode.text], judge))

    def _lacks_reward(self, episode: Episode) -> bool:
        """Whether a reward is missing that training, or evaluation, cannot do without."""
        without = [t for t in episode.trajectories if t.final_reward is None]
        if not self._training:
            return len(without) == len(episode.trajectories)
        return any(self._needs_reward(t.name) and not _brings_advantages(t) for t in without)


def local_loop(
    rollout: RolloutSection,
    run: RunFunction,
    judge: Judger | None,
    engine: RolloutEngine,
    chat: ChatTemplate,
    *,
    training: bool,
    needs_reward: Callable[[str], bool] = lambda role: True,
    journal: RunJournal | None = None,
    values: Values | None = None,
    cut_problem: CutProblem = no_cut_problem,
) -> AgentLoop:
    """A loop over an engine. For evaluation its requests are pinned. A judger that asks the policy gets it."""

    async def ask(messages: Sequence[Message], params: SamplingParams, seed: int) -> str:
        return (await Model(engine, chat, params, seed, training=False).chat(messages)).text

    lend_policy(judge, ask)
    own = engine if training else EvaluationView(engine)
    limits = Limits.from_section(rollout)
    return AgentLoop(run, own, chat, judge, limits, needs_reward, training, journal, values, cut_problem=cut_problem)


def sampling_of(rollout: RolloutSection) -> SamplingParams:
    """How `[rollout]` samples."""
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens, tuple(rollout.stop))


def lend_policy(judge: Judger | None, ask: Any) -> None:
    """Give a judger that asks the run's own model a function to do so."""
    use_policy = getattr(judge, "use_policy", None)
    if callable(use_policy):
        use_policy(ask)


async def start_workflows(loops: Sequence[AgentLoop], limit_s: float | None) -> None:
    """Call `start` of each workflow that has one, once, before its first episode."""
    for workflow in _distinct(loop.workflow for loop in loops):
        if callable(getattr(workflow, "start", None)):
            what = f"start of the workflow {type(workflow).__name__}"
            try:
                await call_user(what, workflow.start, limit_s=limit_s)
            except Exception as error:
                if isinstance(error, HeadraceError):
                    raise
                raise WorkflowError(f"{what} failed: {where_it_failed(error)}") from error


async def close_all(loops: Sequence[AgentLoop]) -> None:
    """Let each workflow and judger, which loops may share, give back what it holds, once."""
    failures: list[Exception] = []
    for holder in _distinct([*(loop.workflow for loop in loops), *(loop.judger for loop in loops)]):
        if callable(getattr(holder, "close", None)):
            try:
                await call_user(f"close of {type(holder).__name__}", holder.close, limit_s=_CLOSE_S)
            except DeadlineError as error:  # the run is over, and sound
                log.warning("%s; it is not waited for any longer", error)
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _distinct(holders: Iterable[Any]) -> list[Any]:
    return list({id(holder): holder for holder in holders if holder is not None}.values())


def _brings_advantages(trajectory: Trajectory) -> bool:
    """Whether a workflow or its teacher says what training needs to know; Steps left out get zeros."""
    return any(step.advantage is not None or step.teacher_messages is not None for step in trajectory.steps)


def _require_finite_rewards(episode: Episode) -> None:
    for trajectory in episode.trajectories:
        for reward in (trajectory.reward, *(step.reward for step in trajectory.steps)):
            if reward is not None and not math.isfinite(reward):
                raise WorkflowError(
                    f'the workflow gave role "{trajectory.name}" the reward {reward}; a reward must be a finite number'
                )


def _raise_if_not_the_users(error: BaseException) -> None:
    """Raise what ends more than the episode: a failure of engine or ledger, or of a judger that is to."""
    if isinstance(error, (EngineError, LedgerError)) and not isinstance(error, PromptTooLongError):
        raise error
    if isinstance(error, JudgeError) and error.stop:
        raise error
    if isinstance(error, BaseExceptionGroup):  # of a TaskGroup in the workflow
        for inner in error.exceptions:
            _raise_if_not_the_users(inner)
