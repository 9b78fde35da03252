"""Evaluation: the same tasks each time, failures counted as wrong, honest estimates."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fakes import FakeEngine, char_chat, episode
from headrace.config import EvalSet, RolloutSection
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.errors import WorkflowError
from headrace.evaluation.evaluator import Evaluator, bootstrap_interval, evaluation_metrics, pass_at_k, wilson_interval
from headrace.judge.base import FunctionJudger
from headrace.rollout.agent_loop import AgentLoop
from headrace.rollout.model_client import Model
from headrace.rollout.store import ValuesInMemory
from headrace.rollout.workflow import single_turn

TASKS = [Task(str(i), instruction=f"Say {word}.", answer=word) for i, word in enumerate(["a", "b", "ab", "ba"])]


def says_the_answer(task: Task, text: str) -> bool:
    return text == task.answer


def a_letter(seed: int) -> str:
    return random.Random(seed).choice("ab")


def loop(engine: FakeEngine | None = None, run: Any = single_turn) -> AgentLoop:
    return AgentLoop(run, engine or FakeEngine(a_letter), char_chat(), FunctionJudger(says_the_answer))


def evaluator(own: AgentLoop | None = None, tasks: list[Task] = TASKS, **section: Any) -> Evaluator:
    rollout = RolloutSection(max_tokens=7, stop=("END",))
    return Evaluator({"words": (EvalSet(tasks="words", **section), tasks)}, own or loop(), rollout, seed=5)


# ---- estimates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(attempts: int) -> None:
    for correct in range(attempts + 1):
        outcomes = [True] * correct + [False] * (attempts - correct)
        for k in range(1, attempts + 1):
            subsets = list(combinations(outcomes, k))
            share = Fraction(sum(map(any, subsets)), len(subsets))
            assert pass_at_k(attempts, correct, k) == pytest.approx(float(share), abs=1e-12)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe 1998, table I, score method without continuity correction
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 1 - 0.1611, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_has_the_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=6e-5)


def test_bootstrap_interval_holds_the_mean_and_is_the_same_each_time() -> None:
    values = [0.0, 0.25, 0.5, 1.0] * 10
    low, high = bootstrap_interval(values, seed=1)
    assert 0.2 < low < np.mean(values) < high < 0.7
    assert bootstrap_interval(values, seed=1) == (low, high)
    assert bootstrap_interval([0.5] * 4) == (0.5, 0.5)


# ---- metrics of episodes ---------------------------------------------------------------------------------------------


def right(**fields: Any) -> Episode:
    return episode(1.0, **fields)


def wrong(**fields: Any) -> Episode:
    return episode(0.0, **fields)


def test_metrics_of_one_attempt() -> None:
    metrics = evaluation_metrics([[right()], [wrong()], [wrong()], [right()]], attempts=1)
    assert metrics["tasks"] == 4 and metrics["failed"] == 0
    assert metrics["pass@1"] == metrics["avg@1"] == metrics["reward"] == 0.5
    assert (metrics["pass@1_low"], metrics["pass@1_high"]) == wilson_interval(2, 4)
    assert metrics["response_tokens"] == 3


def test_metrics_of_several_attempts() -> None:
    metrics = evaluation_metrics([[right(), wrong(), wrong()], [wrong(), wrong(), wrong()]], attempts=3)
    assert {key for key in metrics if key.startswith("pass@") and "_" not in key} == {"pass@1", "pass@2", "pass@3"}
    assert (metrics["pass@1"], metrics["avg@3"]) == pytest.approx((1 / 6, 1 / 6))
    assert metrics["pass@2"] == pytest.approx((2 / 3) / 2)
    assert metrics["pass@3"] == 0.5
    assert (metrics["pass@1_low"], metrics["pass@1_high"]) == bootstrap_interval([1 / 3, 0.0])


def test_a_failed_episode_is_wrong_whatever_it_says_and_is_counted() -> None:
    metrics = evaluation_metrics([[right()], [right(error="broke", is_correct=True)]], attempts=1)
    assert (metrics["tasks"], metrics["failed"], metrics["pass@1"], metrics["reward"]) == (2, 1, 0.5, 0.5)


def test_correctness_goes_before_the_reward() -> None:
    assert evaluation_metrics([[right(is_correct=False)]], 1)["pass@1"] == 0.0
    assert evaluation_metrics([[wrong(is_correct=True)]], 1)["pass@1"] == 1.0
    assert evaluation_metrics([[episode(0.99)]], 1)["pass@1"] == 0.0


def test_metrics_are_also_given_per_source() -> None:
    episodes = [[right(source="easy")], [right(source="easy")], [wrong(source="hard")], [right(source="hard")]]
    metrics = evaluation_metrics(episodes, attempts=1)
    assert (metrics["pass@1"], metrics["easy/pass@1"], metrics["hard/pass@1"]) == (0.75, 1.0, 0.5)
    assert (metrics["easy/tasks"], metrics["hard/tasks"]) == (2, 2)
    assert (metrics["hard/pass@1_low"], metrics["hard/pass@1_high"]) == wilson_interval(1, 2)


def test_a_single_source_is_not_repeated() -> None:
    assert not any("/" in key for key in evaluation_metrics([[right()]], attempts=1))


# ---- whole evaluations -----------------------------------------------------------------------------------------------


async def test_every_task_is_evaluated_the_given_number_of_times() -> None:
    engine = FakeEngine(a_letter)
    metrics = await evaluator(loop(engine), attempts=3).evaluate()
    asked = [char_chat().decode(request.prompt_ids) for request in engine.requests]
    assert {text: asked.count(text) for text in asked} == {
        f"user\nSay {task.answer}.\nassistant\n": 3 for task in TASKS
    }
    assert metrics["eval/words/tasks"] == 4
    assert metrics["eval/words/pass@3"] >= metrics["eval/words/pass@1"] > 0


async def test_every_evaluation_draws_the_same_random_numbers() -> None:
    first, second = FakeEngine(a_letter), FakeEngine(a_letter)
    evaluated = [await evaluator(loop(engine), attempts=2).evaluate() for engine in (first, second, first)]
    assert evaluated[0] == evaluated[1] == evaluated[2]
    asked = [(request.prompt_ids, request.seed) for request in first.requests]
    assert asked[:8] == asked[8:] == [(request.prompt_ids, request.seed) for request in second.requests]
    assert len({seed for _, seed in asked}) == 8


async def test_training_and_other_sets_draw_other_random_numbers() -> None:
    trained, evaluated = FakeEngine(a_letter), FakeEngine(a_letter)
    for index, task in enumerate(TASKS):
        await loop(trained).roll_out_group(task, index, 2, 5, SamplingParams(max_tokens=7))
    sets = {name: (EvalSet(tasks="words", attempts=2), TASKS) for name in ("one", "two")}
    await Evaluator(sets, loop(evaluated), RolloutSection(), seed=5).evaluate()
    assert len({request.seed for request in (*trained.requests, *evaluated.requests)}) == 3 * 2 * len(TASKS)


async def test_evaluating_leaves_the_worlds_random_numbers_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    await evaluator(loop(), attempts=2).evaluate()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


async def test_a_task_that_breaks_is_wrong_and_counted_and_not_replaced() -> None:
    async def run(task: Task, model: Model) -> None:
        if task.id == "0":
            raise RuntimeError("no such tool")
        await model.chat(task.messages)

    metrics = await evaluator(loop(FakeEngine(lambda seed: "b"), run)).evaluate()
    assert (metrics["eval/words/tasks"], metrics["eval/words/failed"]) == (4, 1)
    assert metrics["eval/words/pass@1"] == 0.25


async def test_a_reward_on_the_last_step_counts() -> None:
    async def run(task: Task, model: Model) -> Trajectory:
        return Trajectory((Step.from_model_output(await model.chat(task.messages), reward=1.0),))

    metrics = await evaluator(loop(run=run)).evaluate()
    assert metrics["eval/words/pass@1"] == metrics["eval/words/reward"] == 1.0


async def test_each_set_is_sampled_as_it_says() -> None:
    engine = FakeEngine(a_letter)
    await evaluator(loop(engine), temperature=0.5, max_tokens=3).evaluate()
    await evaluator(loop(engine)).evaluate()
    asked = [(r.params.temperature, r.params.max_tokens, r.params.stop) for r in engine.requests]
    assert asked == [(0.5, 3, ("END",))] * 4 + [(0.0, 7, ("END",))] * 4


async def test_several_sets_are_reported_by_name_and_progress_is_reported() -> None:
    told: list[tuple[str, int, int]] = []
    sets = {name: (EvalSet(tasks="words", attempts=2), TASKS[:2]) for name in ("one", "two")}
    metrics = await Evaluator(sets, loop(), RolloutSection(), 0).evaluate(lambda *args: told.append(args))
    assert {key.split("/")[1] for key in metrics} == {"one", "two"}
    assert told == [(name, done, 4) for name in ("one", "two") for done in (1, 2, 3, 4)]


# ---- failures, settings of sets, metrics of one's own ----------------------------------------------------------------


async def test_one_episode_in_ten_that_fails_is_reported_exactly_and_wrong() -> None:
    tasks = [Task(str(i), instruction="Say b.", answer="b") for i in range(50)]

    async def run(task: Task, model: Model) -> None:
        await model.chat(task.messages)
        if int(task.id) % 10 == 7:
            raise RuntimeError("injected")

    metrics = await evaluator(loop(FakeEngine(lambda seed: "b"), run), tasks=tasks, attempts=2).evaluate()
    assert (metrics["eval/words/tasks"], metrics["eval/words/failed"]) == (50, 10)
    assert metrics["eval/words/pass@1"] == metrics["eval/words/pass@2"] == pytest.approx(0.9)
    assert metrics["eval/words/reward"] == pytest.approx(0.9)


async def test_a_judger_that_fails_is_a_failed_episode() -> None:
    def judge(task: Task, text: str) -> bool:
        if task.id == "1":
            raise RuntimeError("the judge is ill")
        return True

    broken = AgentLoop(single_turn, FakeEngine(a_letter), char_chat(), FunctionJudger(judge))
    metrics = await evaluator(broken).evaluate()
    assert (metrics["eval/words/failed"], metrics["eval/words/pass@1"]) == (1, 0.75)


async def test_a_limit_takes_the_first_tasks_and_leaves_their_random_numbers_as_they_are() -> None:
    whole, part = FakeEngine(a_letter), FakeEngine(a_letter)
    await evaluator(loop(whole), top_p=0.7, temperature=0.5).evaluate()
    metrics = await evaluator(loop(part), top_p=0.7, temperature=0.5, limit=2).evaluate()
    assert metrics["eval/words/tasks"] == 2 and part.requests == whole.requests[:2]
    assert {request.params.top_p for request in whole.requests} == {0.7}


async def test_a_set_may_have_a_loop_of_its_own_with_the_store_it_is_given() -> None:
    async def reads(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        return float(await model.store.get("learned", 0.0))

    sets = {name: (EvalSet(tasks="words"), TASKS[:2]) for name in ("one", "two")}
    values = ValuesInMemory()
    values.put("learned", 1.0)
    usual = loop(FakeEngine(lambda seed: "x"))
    own = AgentLoop(reads, FakeEngine(a_letter), char_chat(), None, training=False, values=values)
    metrics = await Evaluator(sets, usual, RolloutSection(), 0, own_loops={"two": own}).evaluate()
    assert (metrics["eval/one/pass@1"], metrics["eval/two/pass@1"]) == (0.0, 1.0)


def longest(episodes: list[list[Episode]]) -> dict[str, float]:
    return {"longest": max(len(e.text) for task in episodes for e in task)}


async def test_metrics_of_ones_own_are_reported_kept_and_get_all_episodes() -> None:
    kept: list[dict[str, float]] = []
    sets = {"words": (EvalSet(tasks="words", attempts=3, temperature=1.0), TASKS)}
    own = {"a.py:longest": longest, "a.py:count": lambda episodes: {"shape/tasks": len(episodes)}}
    metrics = await Evaluator(sets, loop(), RolloutSection(), 0, own).evaluate(
        keep=lambda name, found, episodes: kept.append(found)
    )
    assert (metrics["eval/words/longest"], metrics["eval/words/shape/tasks"]) == (1.0, 4.0)
    assert kept[0]["longest"] == 1.0


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda episodes: 1 / 0, "failed: ZeroDivisionError"),
        (lambda episodes: 3.0, "must return {name: number}, got 3.0"),
        (lambda episodes: {"x": float("nan")}, '"x" must be a finite number, got nan'),
        (lambda episodes: {"x": "1"}, '"x" must be a finite number'),
        (lambda episodes: {3: 1.0}, "name must be text, got 3"),
        (lambda episodes: {"failed": 1.0}, 'there is a metric "failed" already'),
    ],
)
async def test_a_bad_metric_of_ones_own_is_named(function: Any, problem: str) -> None:
    sets = {"words": (EvalSet(tasks="words"), TASKS)}
    with pytest.raises(WorkflowError, match=r'metric "a\.py:mine"') as caught:
        await Evaluator(sets, loop(), RolloutSection(), 0, {"a.py:mine": function}).evaluate()
    assert problem in str(caught.value)


async def test_every_episode_is_reported_as_it_is_done() -> None:
    told: list[tuple[str, str]] = []
    await evaluator(attempts=2).evaluate(on_episode=lambda name, e: told.append((name, e.task_id)))
    assert sorted(told) == sorted(("words", task.id) for task in TASKS for _ in range(2))
