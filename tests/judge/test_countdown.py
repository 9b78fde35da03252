"""Countdown: problems that can be solved, a split that holds, and a judger that nothing fools."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples, step
from headrace.data.episode import Episode, Trajectory
from headrace.data.sources.countdown import (
    careful_attempt,
    countdown_demonstrations,
    countdown_tasks,
    is_held_out,
    reachable,
)
from headrace.data.task import Task
from headrace.errors import ConfigError
from headrace.judge.base import Verdict
from headrace.judge.countdown import CountdownJudger, evaluate, last_answer

TASK = Task("t", instruction="Make 14.", answer=14, metadata={"numbers": [2, 3, 4], "target": 14})


def problem(task: Task) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(task.metadata["numbers"])), task.metadata["target"]


@cache
def makeable(numbers: tuple[int, ...]) -> set[int]:
    """Every value of every expression over the numbers: cut them in two in all ways, and join what the parts make."""
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[int] = set()
    for size in range(1, len(numbers)):
        for chosen in combinations(range(len(numbers)), size):
            left = makeable(tuple(numbers[i] for i in chosen))
            right = makeable(tuple(numbers[i] for i in range(len(numbers)) if i not in chosen))
            found |= {result for a in left for b in right for result in (a + b, a - b, a * b)}
    return found


# ---- problems --------------------------------------------------------------------------------------------------------


def test_train_and_test_never_share_a_problem() -> None:
    train = {problem(task) for seed in range(4) for task in countdown_tasks("train", 300, seed)}
    test = {problem(task) for seed in range(4) for task in countdown_tasks("test", 60, seed)}
    assert train and test and not train & test


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_problem_can_be_solved_and_is_there_once(split: str) -> None:
    tasks = countdown_tasks(split, 150, seed=3, max_number=9, max_target=40)
    assert len({problem(task) for task in tasks}) == len({task.id for task in tasks}) == 150
    for task in tasks:
        numbers, target = problem(task)
        assert len(numbers) == 3 and all(1 <= number <= 9 for number in numbers)
        assert 1 <= target <= 40 and target in makeable(numbers)
        assert task.answer == target
        listed = " ".join(map(str, task.metadata["numbers"]))
        assert task.messages[0]["content"] == f"Make {target} from {listed}. Use each number once."


@pytest.mark.parametrize("numbers", [1, 2, 4])
def test_problems_may_have_more_or_fewer_numbers(numbers: int) -> None:
    for task in countdown_tasks(count=5, numbers=numbers):
        values, target = problem(task)
        assert len(values) == numbers and target in makeable(values)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert countdown_tasks(count=20, seed=1) == countdown_tasks(count=20, seed=1)
    assert countdown_tasks(count=20, seed=1) != countdown_tasks(count=20, seed=2)


def test_the_split_depends_on_the_problem_alone() -> None:
    held_out = [is_held_out((a, b, 7), target) for a in range(1, 8) for b in range(1, 8) for target in range(1, 40)]
    assert 0.05 < sum(held_out) / len(held_out) < 0.15
    assert all(is_held_out(order, 30) == is_held_out((2, 5, 11), 30) for order in permutations((2, 5, 11)))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"split": "dev"}, 'split must be "train" or "test", got "dev"'),
        ({"count": 50, "max_number": 1}, "found only 3 of 50 distinct train problems; raise max_number"),
        ({"max_target": 0}, "max_target must be at least 1, got 3, 12 and 0"),
        ({"numbers": 0}, "must be at least 1, got 0, 12 and 60"),
    ],
)
def test_problems_that_cannot_be_are_an_error(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        countdown_tasks(**args)


few_numbers = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


@examples
@given(few_numbers)
def test_every_value_that_is_said_to_be_reachable_is_and_its_expression_evaluates_to_it(
    numbers: tuple[int, ...],
) -> None:
    for value, expression in reachable(numbers).items():
        assert value in makeable(numbers)
        assert eval(expression) == value
        parsed = evaluate(expression)
        assert parsed is not None and (sorted(parsed[0]), parsed[1]) == (sorted(numbers), value)


@examples
@given(few_numbers)
def test_numbers_reach_all_that_they_can_make(numbers: tuple[int, ...]) -> None:
    assert set(reachable(numbers)) == makeable(numbers)


def test_two_pairs_are_joined() -> None:
    assert eval(reachable((5, 6, 7, 8))[(5 + 6) * (7 + 8)]) == 165


def test_the_expressions_of_three_numbers_are_those_that_seeds_were_drawn_with() -> None:
    assert list(reachable((2, 3, 4)).items())[:6] == [
        (9, "4+3+2"),
        (14, "(4+3)*2"),
        (5, "4+3-2"),
        (-5, "2-(4+3)"),
        (24, "4*3*2"),
        (10, "4*3-2"),
    ]


# ---- demonstrations --------------------------------------------------------------------------------------------------


def judged(task: Task, text: str, format_reward: float = 0.0) -> Verdict:
    said = Episode(task.id, (Trajectory((step([1], [2], text=text),)),))
    return asyncio.run(CountdownJudger(format_reward).judge(task, said))


def asked(demonstration: Task) -> Task:
    """The problem that a demonstration's question states."""
    found = re.match(r"Make (\d+) from ([\d ]+)\.", demonstration.messages[0]["content"])
    assert found is not None
    numbers = [int(number) for number in found[2].split()]
    return replace(demonstration, metadata={"numbers": numbers, "target": int(found[1])})


def share_right(demonstrations: list[Task]) -> float:
    return sum(judged(asked(task), task.messages[-1]["content"]).reward for task in demonstrations) / len(
        demonstrations
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_demonstration_is_of_a_held_out_problem(seed: int) -> None:
    test = {problem(task) for task in countdown_tasks("test", 100, seed)}
    shown = {problem(asked(task)) for task in countdown_demonstrations(500, seed, hinted=0.2)}
    assert not any(is_held_out(*each) for each in shown)
    assert not test & shown


def test_a_demonstration_asks_as_the_task_does_and_answers_once() -> None:
    for task in countdown_demonstrations(20):
        question, answer = task.messages
        metadata = asked(task).metadata
        listed = " ".join(map(str, metadata["numbers"]))
        assert question["content"] == f"Make {metadata['target']} from {listed}. Use each number once."
        assert answer["role"] == "assistant" and answer["content"].count("<answer>") == 1
    assert len({task.id for task in countdown_demonstrations(20)}) == 20


def test_careful_demonstrations_are_all_right_and_guesses_rarely() -> None:
    assert share_right(countdown_demonstrations(200, careful=1.0)) == 1.0
    assert share_right(countdown_demonstrations(300, careful=0.0)) < 0.2


@examples
@given(st.lists(st.integers(1, 12), min_size=3, max_size=3), st.data())
def test_a_careful_attempt_arrives_and_all_that_it_says_is_true(numbers: list[int], data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(sorted(value for value in makeable(tuple(numbers)) if value >= 1)))
    attempt = careful_attempt(numbers, target)
    worked, _, _ = attempt.partition(" <answer>")
    for equation in (word for word in worked.split() if "=" in word):
        assert len({Fraction(eval(side)) for side in equation.split("=")}) == 1
    task = Task("t", instruction="", metadata={"numbers": numbers, "target": target})
    assert judged(task, attempt).reward == 1.0


def test_an_attempt_at_the_impossible_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"7 cannot be made from \[1, 1, 1\]"):
        careful_attempt([1, 1, 1], 7)


# ---- the judger ------------------------------------------------------------------------------------------------------

RIGHT = [
    "<answer>2 + 3 * 4</answer>",
    "<answer>(4 * 3) + 2</answer>",
    "so 4 × 3 is 12 <answer> 2 + 4 × 3 </answer> done",
    "<answer>2 + 3 + 4</answer> no, <answer>2+3*4</answer>",
    "<answer>\n2 + 3 * 4\n</answer>",
    f"<answer>{'(' * 95}2+3*4{')' * 95}</answer>",
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_right_answer_is_worth_1(text: str) -> None:
    verdict = judged(TASK, text)
    assert (verdict.reward, verdict.is_correct, verdict.metrics) == (1.0, True, {"well_formed": 1.0})


@pytest.mark.parametrize("text", ["<answer>2 + 3 + 4</answer>", "<answer>2 - 3 * 4</answer>", "<answer>4/3/2</answer>"])
def test_a_well_formed_answer_that_misses_is_worth_the_format_reward(text: str) -> None:
    assert judged(TASK, text) == Verdict(0.0, False, {"well_formed": 1.0})
    assert judged(TASK, text, 0.1) == Verdict(0.1, False, {"well_formed": 1.0})


MALFORMED = {
    "nothing": "",
    "no tags": "2 + 3 * 4",
    "empty tags": "<answer></answer>",
    "blank": "<answer>   </answer>",
    "tag not closed": "<answer>2 + 3 * 4",
    "only the last counts": "<answer>2 + 3 * 4</answer> or <answer>?</answer>",
    "number used twice": "<answer>2 * 3 + 4 + 4</answer>",
    "number left out": "<answer>2 + 3 * 4 * 0 + 12</answer>",
    "only the target": "<answer>14</answer>",
    "an equation": "<answer>2 + 3 * 4 = 14</answer>",
    "a comparison": "<answer>2 + 3 * 4 == 14</answer>",
    "division by zero": "<answer>2 / (3 - 3) + 4</answer>",
    "power": "<answer>2 ** 3 + 4</answer>",
    "huge power": "<answer>9 ** 9 ** 9 ** 9 ** 9</answer>",
    "huge number": f"<answer>{'9' * 190}</answer>",
    "huge product": f"<answer>{' * '.join(['9999'] * 28)}</answer>",
    "over the length": f"<answer>{'9' * 100_000}</answer>",
    "deep parentheses": f"<answer>{'(' * 95}2 + 3 + 3{')' * 95}</answer>",
    "unbalanced parentheses": f"<answer>{'(' * 95}2 + 3 * 4{')' * 94}</answer>",
    "very deep parentheses": f"<answer>{'(' * 50_000}2{')' * 50_000}</answer>",
    "deep minuses": f"<answer>{'-' * 190}2</answer>",
    "a negative number": "<answer>-2 + 3 * 4 + 4</answer>",
    "shift": "<answer>2 << 3 | 4</answer>",
    "floor division": "<answer>2 + 3 * 4 // 1</answer>",
    "a name": "<answer>target</answer>",
    "a call": "<answer>print(2) + 3 * 4</answer>",
    "an import": "<answer>__import__('os').getcwd()</answer>",
    "an attribute": "<answer>(2).real + 3 * 4</answer>",
    "a lambda": "<answer>(lambda: 14)()</answer>",
    "a comprehension": "<answer>sum(x for x in (2, 12))</answer>",
    "a walrus": "<answer>(x := 2) + 3 * 4</answer>",
    "a text": "<answer>'2 + 3 * 4'</answer>",
    "a float": "<answer>2.0 + 3 * 4</answer>",
    "a complex number": "<answer>2j + 3 * 4</answer>",
    "a truth value": "<answer>True + 2 + 3 * 4 - True</answer>",
    "a leading zero": "<answer>02 + 3 * 4</answer>",
    "several lines": "<answer>2 +\n3 * 4</answer>",
    "two statements": "<answer>2; 3 * 4</answer>",
    "a null character": "<answer>2 + 3 * 4\0</answer>",
    "a lone surrogate": "<answer>2 + 3 * 4\ud800</answer>",
    "other digits": "<answer>٢ + ٣ * ٤</answer>",
    "other operators": "<answer>2 ＋ 3 ∗ 4</answer>",
    "an emoji": "<answer>2 + 3 * 4 🎉</answer>",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_proper_answer_is_worth_nothing_and_is_reported_quickly(text: str) -> None:
    started = time.perf_counter()
    assert judged(TASK, text, format_reward=0.5) == Verdict(0.0, False, {"well_formed": 0.0})
    assert time.perf_counter() - started < 1.0


@examples
@given(st.text(st.sampled_from("0123456789+-*/()., ×abc_'\"\\\n"), max_size=30))
def test_no_text_breaks_the_judger(text: str) -> None:
    found = evaluate(text)
    assert found is None or isinstance(found[1], Fraction)
    judged(TASK, f"<answer>{text}</answer>")


@pytest.mark.parametrize("text", ["True + 2", "2.0 + 3", "2j + 3", "'2'", "None", "..."])
def test_only_integers_are_numbers(text: str) -> None:
    assert evaluate(text) is None


def test_division_is_exact() -> None:
    assert evaluate("1 / 3 + 1 / 3 + 1 / 3") == ([1, 3, 1, 3, 1, 3], Fraction(1))


def test_the_last_answer_is_taken() -> None:
    assert last_answer("<answer>1</answer> <answer> 2 </answer> 3") == "2"
    assert last_answer("none") == ""
