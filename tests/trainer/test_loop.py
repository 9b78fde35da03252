"""AgentLoop: what a workflow may return, and what happens when it fails."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import FakeEngine, char_chat
from headrace.data.episode import Episode, Step, TerminationReason, Trajectory
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import ConfigError, EngineError, PromptTooLongError
from headrace.judge.base import FunctionJudger, Judger, Verdict, as_judger
from headrace.registry import load_object
from headrace.rollout.agent_loop import AgentLoop, Limits, RolloutSpec
from headrace.rollout.model_client import Model
from headrace.rollout.workflow import as_run_function, demonstration, self_distill, single_turn

TASK = Task("task 7", instruction="Say a word.", source="words")
SAMPLING = SamplingParams(temperature=1.0, max_tokens=16)
SPEC = RolloutSpec(TASK, group_id=3, rollout_idx=1, seed=11)


class ScalarTensor:
    """As much of a tensor without axes as a reward needs."""

    ndim = 0

    def __init__(self, value: float) -> None:
        self._value = value

    def __float__(self) -> float:
        return self._value


class LengthJudger(Judger):
    """Rewards long replies, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Episode] = []

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        self.seen.append(episode)
        return Verdict(float(len(episode.text)), is_correct=True, metrics={"length": float(len(episode.text))})


def manager(
    run: Any,
    engine: FakeEngine | None = None,
    judger: Judger | None = None,
    needs_reward: Callable[[str], bool] = lambda role: True,
    **limits: Any,
) -> AgentLoop:
    return AgentLoop(run, engine or FakeEngine(), char_chat(), judger, Limits(**limits), needs_reward)


async def roll_out(run: Any, engine: FakeEngine | None = None, judger: Judger | None = None, **limits: Any) -> Episode:
    return await manager(run, engine, judger, **limits).roll_out(SPEC, SAMPLING)


def in_turn(*replies: str) -> Callable[[int], str]:
    """Replies given one after another, whatever the seed."""
    said = iter(replies)
    return lambda seed: next(said)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What Headrace logs meanwhile."""
    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keeper, logger = Keeper(), logging.getLogger("headrace")
    logger.addHandler(keeper)
    yield lines
    logger.removeHandler(keeper)


# ---- what a workflow may return --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        (0.25, 0.25), (1, 1.0), (True, 1.0), (False, 0.0), (-2.5, -2.5), (np.float32(0.5), 0.5), (np.int64(2), 2.0),
        (np.bool_(True), 1.0), (np.array(0.5), 0.5), (Fraction(1, 2), 0.5), (ScalarTensor(0.5), 0.5),
    ],
)  # fmt: skip
async def test_a_number_is_the_reward_of_everything_the_model_was_asked(outcome: Any, reward: float) -> None:
    async def run(task: Task, model: Model) -> Any:
        await model.chat(task.messages, role="solver")
        await model.chat(task.messages, role="critic")
        await model.chat(task.messages, role="solver")
        return outcome

    episode = await roll_out(run)
    assert [(t.name, len(t.steps), t.reward) for t in episode.trajectories] == [
        ("solver", 2, reward),
        ("critic", 1, reward),
    ]
    assert episode.reward == reward and not episode.failed
    assert all(type(t.reward) is float for t in episode.trajectories)


async def test_none_leaves_the_reward_to_the_judger() -> None:
    judger = LengthJudger()
    episode = await roll_out(single_turn, FakeEngine(lambda seed: "four"), judger)
    assert judger.seen[0].text == "four"
    assert (episode.reward, episode.is_correct, episode.metrics) == (4.0, True, {"length": 4.0})


async def test_a_trajectory_is_taken_as_it_is() -> None:
    async def run(task: Task, model: Model) -> Trajectory:
        output = await model.chat(task.messages)
        await model.chat(task.messages)  # asked, but not to be trained
        return Trajectory((Step.from_model_output(output, task.messages),), "mine", 0.5)

    episode = await roll_out(run, judger=LengthJudger())
    assert [(t.name, len(t.steps), t.reward) for t in episode.trajectories] == [("mine", 1, 0.5)]


async def test_a_list_of_trajectories_is_taken_as_it_is() -> None:
    async def run(task: Task, model: Model) -> list[Trajectory]:
        made = Step.from_model_output(await model.chat(task.messages))
        return [Trajectory((made,), "a", 1.0), Trajectory((made,), "b", 0.0)]

    assert [(t.name, t.reward) for t in (await roll_out(run)).trajectories] == [("a", 1.0), ("b", 0.0)]


async def test_an_episode_is_kept_but_for_its_identity() -> None:
    async def run(task: Task, model: Model) -> Episode:
        await model.chat(task.messages)
        return Episode(
            "of another", tuple(model.trajectories(0.5)), group_id=99, is_correct=True, metrics={"turns": 1.0}
        )

    episode = await roll_out(run)
    assert (episode.task_id, episode.group_id, episode.rollout_idx, episode.seed) == ("task 7", 3, 1, 11)
    assert (episode.source, episode.is_correct, episode.metrics) == ("words", True, {"turns": 1.0})


@pytest.mark.parametrize("outcome", ["done", [1.0], {"reward": 1.0}, np.array([1.0]), 1j])
async def test_anything_else_fails_the_episode_and_says_what_is_wanted(outcome: Any) -> None:
    async def run(task: Task, model: Model) -> Any:
        await model.chat(task.messages)
        return outcome

    error = (await roll_out(run)).error
    assert error is not None and "a workflow returns an Episode, a Trajectory, a list of Trajectories" in error


@pytest.mark.parametrize("outcome", [1.0, None, [], Trajectory(()), Episode("t")])
async def test_an_episode_with_nothing_to_train_fails(outcome: Any) -> None:
    async def run(task: Task, model: Model) -> Any:
        return outcome

    error = (await roll_out(run, judger=LengthJudger())).error
    assert error is not None and "nothing to train" in error


async def test_an_episode_that_the_workflow_calls_failed_stays_failed() -> None:
    async def run(task: Task, model: Model) -> Episode:
        return Episode("t", error="the sandbox is gone")

    assert (await roll_out(run)).error == "the sandbox is gone"


async def test_the_text_of_an_episode_is_the_last_thing_the_model_said_in_whichever_role() -> None:
    async def run(task: Task, model: Model) -> None:
        for role in ("solver", "critic", "solver"):
            await model.chat(task.messages, role=role)

    judger = LengthJudger()
    episode = await roll_out(run, FakeEngine(in_turn("draft", "critique", "final")), judger)
    assert episode.text == judger.seen[0].text == "final"
    assert (await roll_out(run, FakeEngine(in_turn("draft", "critique", "")), judger)).text == ""


async def test_the_text_of_trajectories_of_the_workflows_own_is_that_of_their_last_call() -> None:
    async def run(task: Task, model: Model) -> list[Trajectory]:
        first, second = await model.chat(task.messages), await model.chat(task.messages)
        await model.chat(task.messages)  # asked, but not to be trained
        made = [Step.from_model_output(output) for output in (second, first)]
        return [Trajectory((step,), name, 1.0) for step, name in zip(made, "ab", strict=True)]

    assert (await roll_out(run, FakeEngine(in_turn("one", "two", "three")))).text == "two"


async def test_a_distilled_workflow_says_the_same() -> None:
    @self_distill(lambda task, step: task.messages)
    async def run(task: Task, model: Model) -> None:
        for role in ("solver", "critic", "solver"):
            await model.chat(task.messages, role=role)

    assert (await roll_out(run, FakeEngine(in_turn("draft", "critique", "final")))).text == "final"


async def test_a_distilled_workflow_that_returns_nonsense_gets_an_error_that_says_what_is_wanted() -> None:
    @self_distill(lambda task, step: task.messages)
    async def run(task: Task, model: Model) -> Any:
        await model.chat(task.messages)
        return "done"

    assert "a workflow returns an Episode, a Trajectory" in ((await roll_out(run)).error or "")


async def test_a_demonstration_samples_nothing() -> None:
    engine = FakeEngine()
    task = Task("d", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    episode = await manager(demonstration, engine).roll_out(RolloutSpec(task, 0, 0, 0), SAMPLING)
    assert (episode.reward, episode.text, engine.requests) == (1.0, "b", [])


async def test_a_class_serves_all_episodes_with_its_arguments() -> None:
    class Twice:
        def __init__(self, reward: float) -> None:
            self.reward = reward

        async def run(self, task: Task, model: Model) -> float:
            await model.chat(task.messages)
            return self.reward

    assert (await roll_out(as_run_function(Twice, {"reward": 0.5}))).reward == 0.5
    assert (await roll_out(as_run_function(Twice(0.25), {}))).reward == 0.25


def test_a_workflow_that_is_no_coroutine_function_is_an_error() -> None:
    def plain(task: Task, model: Model) -> float:
        return 1.0

    with pytest.raises(ConfigError, match='workflow "plain" must be "async def run'):
        as_run_function(plain, {})
    with pytest.raises(ConfigError, match=r"workflow\.args \['depth'\] are given"):
        as_run_function(single_turn, {"depth": 1})


async def test_a_cut_reply_ends_the_episode_for_its_length() -> None:
    long = FakeEngine(lambda seed: "a" * 100)
    assert (await roll_out(single_turn, long, LengthJudger())).termination == TerminationReason.LENGTH
    assert (await roll_out(single_turn, judger=LengthJudger())).termination == TerminationReason.DONE


# ---- judging ---------------------------------------------------------------------------------------------------------


async def test_the_judger_is_not_asked_when_there_is_a_reward() -> None:
    async def on_the_last_step(task: Task, model: Model) -> Trajectory:
        return Trajectory((Step.from_model_output(await model.chat(task.messages), reward=0.5),))

    judger = LengthJudger()
    assert (await roll_out(on_the_last_step, judger=judger)).reward == 0.5
    assert judger.seen == []


async def test_the_judger_rewards_only_what_has_no_reward() -> None:
    async def run(task: Task, model: Model) -> list[Trajectory]:
        output = await model.chat(task.messages)
        plain, rewarded = Step.from_model_output(output), Step.from_model_output(output, reward=0.25)
        return [Trajectory((plain,), "a", 0.5), Trajectory((rewarded,), "b"), Trajectory((plain,), "c")]

    episode = await roll_out(run, FakeEngine(lambda seed: "four"), LengthJudger())
    assert [t.reward for t in episode.trajectories] == [0.5, 0.25, 4.0]


async def test_the_workflows_own_word_on_correctness_goes_before_the_judgers() -> None:
    async def run(task: Task, model: Model) -> Episode:
        await model.chat(task.messages)
        return Episode("t", tuple(model.trajectories()), is_correct=False, metrics={"turns": 1.0})

    episode = await roll_out(run, FakeEngine(lambda seed: "four"), LengthJudger())
    assert (episode.is_correct, episode.metrics) == (False, {"turns": 1.0, "length": 4.0})


async def test_without_reward_and_judger_the_episode_fails_and_says_what_to_do() -> None:
    error = (await roll_out(single_turn)).error
    assert error is not None and "return a number or set workflow.judger" in error


async def test_a_judger_that_breaks_fails_the_episode() -> None:
    def broken(task: Task, text: str) -> float:
        raise KeyError("answer")

    episode = await roll_out(single_turn, judger=FunctionJudger(broken))
    assert (episode.error, episode.termination) == ("KeyError: 'answer'", TerminationReason.JUDGE)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float32("nan")])
async def test_a_reward_that_is_not_finite_fails_the_episode(reward: Any) -> None:
    async def a_number(task: Task, model: Model) -> Any:
        await model.chat(task.messages)
        return reward

    async def on_a_step(task: Task, model: Model) -> Trajectory:
        made = Step.from_model_output(await model.chat(task.messages), reward=reward)
        return Trajectory((made,), reward=1.0)

    for run in (a_number, on_a_step):
        error = (await roll_out(run, judger=LengthJudger())).error
        assert (
            error is not None and f'the workflow gave role "agent" the reward {float(reward)}; a reward must' in error
        )
    judged = await roll_out(single_turn, judger=FunctionJudger(lambda task, text: reward))
    assert judged.error == (
        f"WorkflowError: the judger gave the reward {float(reward)}; a reward must be a finite number"
    )
    assert judged.is_correct is False and judged.reward == 0.0


@pytest.mark.parametrize("score", [np.float32(1), np.bool_(True), ScalarTensor(1.0), Verdict(np.float64(1))])
async def test_a_judger_may_give_whatever_is_a_number(score: Any) -> None:
    episode = await roll_out(single_turn, judger=FunctionJudger(lambda task, text: score))
    assert [t.reward for t in episode.trajectories] == [1.0] and type(episode.trajectories[0].reward) is float


@pytest.mark.parametrize("score", [None, "1.0", [1.0]])
async def test_a_judger_that_gives_no_number_fails_the_episode_and_is_reported_so(score: Any) -> None:
    episode = await roll_out(single_turn, judger=FunctionJudger(lambda task, text: score))
    assert episode.error == f"WorkflowError: a judger gives a number as reward, got {score!r}"


async def say_hello(task: Task, text: str) -> bool:
    return text == "hello"


@pytest.mark.parametrize("function", [lambda task, text: text == "hello", say_hello, lambda task, text: Verdict(1.0)])
async def test_a_function_is_a_judger(function: Any) -> None:
    episode = await roll_out(single_turn, FakeEngine(lambda seed: "hello"), as_judger(function, {}))
    assert episode.reward == 1.0


def test_arguments_of_a_judger_need_a_class() -> None:
    with pytest.raises(ConfigError, match=r"judger_args \['a'\] are given"):
        as_judger(say_hello, {"a": 1})
    with pytest.raises(ConfigError, match="a judger is a Judger or a function"):
        as_judger(3, {})


# ---- failures --------------------------------------------------------------------------------------------------------


async def test_an_exception_in_user_code_fails_only_that_episode() -> None:
    started = count()

    async def run(task: Task, model: Model) -> float:
        index = next(started)
        await model.chat(task.messages)
        if index == 1:
            raise RuntimeError("no such tool")
        return 1.0

    episodes = await manager(run).roll_out_group(TASK, 0, 4, 0, SAMPLING)
    assert [episode.error for episode in episodes] == [None, "RuntimeError: no such tool", None, None]
    failed = episodes[1]
    assert (failed.termination, failed.is_correct, failed.rollout_idx) == (TerminationReason.ERROR, False, 1)
    assert failed.response_tokens > 0  # what was sampled before stays to be looked at


USER_CODE = """
import json

async def run(task, model):
    return json.loads("no json")  # this is the line
"""


async def test_the_log_shows_the_users_own_line_wherever_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "headrace" / "flow.py"  # a folder named as the package is still the user's
    path.parent.mkdir()
    path.write_text(USER_CODE)
    with log_lines() as lines:
        await roll_out(load_object(f"{path}:run"))
    assert len(lines) == 1
    assert lines[0].startswith("episode of task task 7 failed: JSONDecodeError: ")
    assert lines[0].endswith(f'at {path}:5: return json.loads("no json")  # this is the line')


async def test_an_episode_over_its_time_fails_with_that_reason() -> None:
    episode = await roll_out(single_turn, FakeEngine(takes_s=30), LengthJudger(), timeout_s=0.02)
    assert (episode.termination, episode.error) == (TerminationReason.TIMEOUT, "took longer than 0.02 s")
    assert episode.failed and episode.is_correct is False


async def test_waiting_for_a_place_is_not_counted_as_time_of_the_episode() -> None:
    engine = FakeEngine(takes_s=0.05)
    one_at_a_time = manager(single_turn, engine, LengthJudger(), max_concurrent=1, timeout_s=0.25)
    episodes = await one_at_a_time.roll_out_group(TASK, 0, 6, 0, SAMPLING)
    assert engine.most_busy == 1
    assert not any(episode.failed for episode in episodes)


async def test_a_time_out_of_the_users_own_is_an_error_not_the_episodes_time_out() -> None:
    async def run(task: Task, model: Model) -> float:
        raise TimeoutError("the tool server does not answer")

    episode = await roll_out(run)
    assert (episode.termination, episode.error) == (
        TerminationReason.ERROR,
        "TimeoutError: the tool server does not answer",
    )


async def test_a_cancellation_inside_user_code_fails_only_that_episode() -> None:
    async def run(task: Task, model: Model) -> float:
        tool = asyncio.ensure_future(asyncio.sleep(10))
        tool.cancel()
        await tool
        return 1.0

    episodes = await asyncio.wait_for(manager(run).roll_out_group(TASK, 0, 2, 0, SAMPLING), 1)
    assert [episode.error for episode in episodes] == [
        "the workflow raised CancelledError, and the run had not cancelled it"
    ] * 2


async def test_a_cancellation_from_outside_ends_the_rollout() -> None:
    running = asyncio.create_task(roll_out(single_turn, FakeEngine(takes_s=30)))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_engine_failure_is_raised() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        await roll_out(single_turn, FakeEngine(breaks="out of memory"))


async def test_an_engine_failure_inside_a_task_group_of_the_workflow_is_raised() -> None:
    async def run(task: Task, model: Model) -> float:
        async with asyncio.TaskGroup() as calls:
            calls.create_task(model.chat(task.messages, role="a"))
            calls.create_task(model.chat(task.messages, role="b"))
        return 1.0

    with pytest.raises(EngineError, match="out of memory"):
        await roll_out(run, FakeEngine(breaks="out of memory"))


async def test_the_error_inside_a_task_group_of_the_workflow_is_the_one_that_is_reported() -> None:
    async def break_down() -> None:
        raise RuntimeError("no such tool")

    async def run(task: Task, model: Model) -> None:
        async with asyncio.TaskGroup() as calls:
            calls.create_task(break_down())

    assert (await roll_out(run)).error == "RuntimeError: no such tool"


# ---- prompts that outgrow the model ----------------------------------------------------------------------------------


async def talk_on(task: Task, model: Model) -> None:
    """A conversation without an end."""
    messages = list(task.messages)
    while True:
        messages += [(await model.chat(messages)).message, {"role": "user", "content": "Go on."}]


async def test_a_prompt_that_outgrows_the_model_ends_its_episode_which_is_judged_with_what_it_has() -> None:
    judger = LengthJudger()
    episode = await roll_out(talk_on, FakeEngine(in_turn("one", "two", "three", "four"), room=80), judger)
    assert (episode.termination, episode.error, episode.failed) == (TerminationReason.LENGTH, None, False)
    assert [step.text for step in episode.trajectories[0].steps] == ["one", "two"]
    assert (episode.text, episode.reward, episode.is_correct) == ("two", 3.0, True)
    assert (episode.task_id, episode.group_id, episode.rollout_idx, episode.seed) == ("task 7", 3, 1, 11)


async def test_its_siblings_continue() -> None:
    first = iter([True, False])

    async def run(task: Task, model: Model) -> float:
        if next(first):
            await talk_on(task, model)
        await model.chat(task.messages)
        return 1.0

    episodes = await manager(run, FakeEngine(room=100), LengthJudger()).roll_out_group(TASK, 0, 2, 0, SAMPLING)
    assert [episode.termination for episode in episodes] == [TerminationReason.LENGTH, TerminationReason.DONE]
    assert not any(episode.failed for episode in episodes)


async def test_an_episode_whose_first_prompt_is_too_long_fails_by_its_length() -> None:
    episode = await roll_out(talk_on, FakeEngine(room=10), LengthJudger())
    assert episode.failed and episode.is_correct is False and episode.trajectories == ()
    assert episode.termination == TerminationReason.LENGTH
    assert episode.error == "PromptTooLongError: the prompt has 30 tokens, more than 10"


async def test_a_prompt_that_is_too_long_inside_a_task_group_of_the_workflow_is_the_same() -> None:
    async def run(task: Task, model: Model) -> None:
        first = await model.chat(task.messages)
        async with asyncio.TaskGroup() as calls:
            for _ in range(2):
                calls.create_task(model.chat([*task.messages, first.message, *task.messages]))

    episode = await roll_out(run, FakeEngine(room=60), LengthJudger())
    assert (episode.termination, episode.failed, len(episode.trajectories[0].steps)) == ("length", False, 1)
    episode = await roll_out(run, FakeEngine(room=10), LengthJudger())
    assert (episode.termination, episode.failed) == ("length", True)


async def test_a_workflow_may_catch_it_and_continue() -> None:
    async def run(task: Task, model: Model) -> float:
        try:
            await talk_on(task, model)
        except PromptTooLongError:
            await model.chat(task.messages)
        return 0.5

    episode = await roll_out(run, FakeEngine(room=100))
    assert (episode.reward, episode.termination) == (0.5, TerminationReason.DONE)


async def test_where_only_the_workflow_could_have_rewarded_it_the_episode_fails_and_says_what_to_do() -> None:
    error = (await roll_out(talk_on, FakeEngine(room=100))).error
    assert error is not None and "the workflow can catch PromptTooLongError" in error
    assert not (await roll_out(talk_on, FakeEngine(room=100), needs_reward=lambda role: False)).failed


async def test_a_distilled_workflow_that_outgrows_the_model_keeps_its_teachers_prompts() -> None:
    class Agent:
        @self_distill(lambda task, step: [{"role": "user", "content": f"Hint: {step.text}"}])
        async def run(self, task: Task, model: Model) -> None:
            await talk_on(task, model)

    episode = await roll_out(Agent().run, FakeEngine(in_turn("one", "two", "three"), room=80))
    assert (episode.termination, episode.failed) == (TerminationReason.LENGTH, False)
    hints = [step.teacher_messages for step in episode.trajectories[0].steps]
    assert hints == [({"role": "user", "content": f"Hint: {text}"},) for text in ("one", "two")]


@pytest.mark.parametrize(("advantages", "failed"), [((0, 1), False), ((0,), False), ((), True)])
async def test_a_trajectory_with_some_advantages_of_its_own_needs_no_reward(
    advantages: tuple[int, ...], failed: bool
) -> None:
    async def tutor(task: Task, model: Model) -> Trajectory:
        for _ in range(2):
            await model.chat(task.messages)
        (said,) = model.trajectories()
        steps = [
            replace(step, advantage=(0.5,) * len(step.response_ids)) if place in advantages else step
            for place, step in enumerate(said.steps)
        ]
        return replace(said, steps=tuple(steps))

    assert (await roll_out(tutor)).failed is failed


# ---- tasks -----------------------------------------------------------------------------------------------------------


async def test_a_workflow_that_changes_its_task_changes_no_siblings() -> None:
    task = Task("t", instruction="Say a word.", metadata={"numbers": [1, 2, 3]})
    seen: list[Any] = []

    async def run(own: Task, model: Model) -> None:
        seen.append((own.messages[0]["content"], own.metadata["numbers"].pop()))
        own.messages[0]["content"] = "Say nothing."
        await model.chat(own.messages)

    judger = FunctionJudger(lambda judged, text: judged.metadata["numbers"] == [1, 2, 3])
    episodes = await manager(run, judger=judger).roll_out_group(task, 0, 3, 0, SAMPLING)
    assert seen == [("Say a word.", 3)] * 3
    assert [episode.reward for episode in episodes] == [1.0] * 3
    assert task.messages == ({"role": "user", "content": "Say a word."},)
    assert episodes[0].trajectories[0].steps[0].messages == ({"role": "user", "content": "Say nothing."},)


# ---- seeds -----------------------------------------------------------------------------------------------------------


async def seeds_and_texts(seed: int, group_id: int, count: int, **limits: Any) -> list[tuple[int, str]]:
    async def two_turns(task: Task, model: Model) -> float:
        first = await model.chat(task.messages)
        await model.chat([*task.messages, first.message, {"role": "user", "content": "More."}])
        return 1.0

    rolled = manager(two_turns, **limits)
    episodes = await rolled.roll_out_group(TASK, group_id, count, seed, SAMPLING)
    assert [episode.rollout_idx for episode in episodes] == list(range(count))
    return [(episode.seed, "/".join(s.text for t in episode.trajectories for s in t.steps)) for episode in episodes]


async def test_seeds_depend_on_seed_group_and_rollout_only() -> None:
    alone = await seeds_and_texts(0, 3, 1)
    among = await seeds_and_texts(0, 3, 8)
    one_at_a_time = await seeds_and_texts(0, 3, 8, max_concurrent=1)
    assert among == one_at_a_time
    assert among[:1] == alone


async def test_every_rollout_and_every_call_has_a_seed_of_its_own() -> None:
    engine = FakeEngine()
    for seed in (0, 1):
        for group_id in (0, 1):
            rolled = manager(single_turn, engine, LengthJudger())
            await rolled.roll_out_group(TASK, group_id, 4, seed, SAMPLING)
    assert len({request.seed for request in engine.requests}) == 16


async def test_each_finished_episode_is_announced_once() -> None:
    announced: list[int] = []
    rolled = manager(single_turn, judger=LengthJudger())
    await rolled.roll_out_group(TASK, 0, 5, 0, SAMPLING, lambda episode: announced.append(episode.rollout_idx))
    assert sorted(announced) == [0, 1, 2, 3, 4]
