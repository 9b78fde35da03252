"""Judgers that run here: what each calls right, and what it makes of tasks that cannot be judged."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import step
from headrace.data.episode import Episode, Trajectory
from headrace.data.task import Task
from headrace.errors import ConfigError, DataError
from headrace.judge.base import Judger, Verdict, as_judger
from headrace.judge.compose import OverlongPenalty, WeightedSum
from headrace.judge.math import MathJudger
from headrace.judge.text import (
    ChoiceJudger,
    ExactJudger,
    F1Judger,
    NumericJudger,
    RegexJudger,
    choice_in,
    last_number,
    squad_tokens,
)


def said(text: str, tokens: int = 3) -> Episode:
    return Episode("t", (Trajectory((step([1], list(range(tokens)), text=text),)),))


def task(answer: Any = None, **metadata: Any) -> Task:
    return Task("t", instruction="?", answer=answer, metadata=metadata)


async def reward(judger: Judger, text: str, answer: Any) -> float:
    verdict = await judger.judge(task(answer), said(text))
    assert verdict.is_correct == (verdict.reward >= 1.0)
    return verdict.reward


@pytest.mark.parametrize(
    ("arguments", "text", "answer", "right"),
    [
        ({}, " Paris\n", "Paris", True),
        ({}, "paris", "Paris", False),
        ({"ignore_case": True}, "PARIS", "Paris", True),
        ({"squeeze": True}, "New \n York", "New York", True),
        ({"where": "tags"}, "I say <answer> Lima </answer>.", "Lima", True),
        ({"where": "tags"}, "Lima", "Lima", False),
        ({"where": "box"}, r"so \boxed{x_{1}}", "x_{1}", True),
        ({}, "Rome", ["Paris", "Rome"], True),
        ({}, "7", 7, True),
    ],
)
async def test_exact(arguments: dict[str, Any], text: str, answer: Any, right: bool) -> None:
    assert await reward(ExactJudger(**arguments), text, answer) == right


@pytest.mark.parametrize(
    ("arguments", "text", "answer", "right"),
    [
        ({}, "It is 18.", 18, True),
        ({}, "first 3, then 4", "4", True),
        ({}, "first 3, then 4", "3", False),
        ({}, "#### 1,234", "1234", True),
        ({}, "The total is $1,234.50 in all", "1234.5", True),
        ({}, r"\boxed{\frac{1}{2}} or 7", "0.5", True),
        ({}, "<answer>-3/4</answer> since 9", "-0.75", True),
        ({}, "50%", "0.5", True),
        ({}, "0.5", "50%", True),
        ({"percent": False}, "50%", "0.5", False),
        ({}, "50%", "50", True),
        ({}, "3.14", "3.14159", False),
        ({"tolerance": 0.01}, "3.14", "3.14159", True),
        ({"relative": 0.01}, "1005", "1000", True),
        ({"relative": 0.001}, "1005", "1000", False),
        ({}, "1e3", "1000", True),
        ({}, "−5", "-5", True),
        ({}, "5 - 3", "3", True),
        ({}, "1/0", "1", False),
        ({}, "no number", "1", False),
        ({}, "x2", "2", False),
        ({"marked_only": True}, "It is 18.", 18, False),
        ({}, "#### 72\nDone in 3 steps", "#### 72", True),
        ({}, "9", ["8", "9"], True),
        ({}, "٣", "3", False),
    ],
)
async def test_numeric(arguments: dict[str, Any], text: str, answer: Any, right: bool) -> None:
    assert await reward(NumericJudger(**arguments), text, answer) == right


async def test_an_expected_answer_that_is_no_number_is_a_failure_and_no_wrong_answer() -> None:
    with pytest.raises(DataError, match="'many' is no number"):
        await NumericJudger().judge(task("many"), said("3"))


@pytest.mark.parametrize("judger", [ExactJudger(), NumericJudger(), F1Judger(), ChoiceJudger(), MathJudger()])
async def test_a_task_without_an_answer_cannot_be_judged(judger: Judger) -> None:
    for answer in (None, [], [None]):
        with pytest.raises(DataError, match="has no answer to compare with"):
            await judger.judge(task(answer), said("3"))


def test_numbers_are_read_exactly() -> None:
    found = last_number("0.1")
    assert found is not None and found[0] * 10 == 1 and not found[1]
    texts = ("1,000", "12,34", "5%", "-$3", "7.", ".5", "1/3")
    assert [str(number[0]) for text in texts if (number := last_number(text))] == [
        *("1000", "34", "5", "-3", "7", "1/2", "1/3")
    ]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b.", "B"),
        ("(C)", "C"),
        ("**D**", "D"),
        ("The answer is B.", "B"),
        ("Answer: **C**", "C"),
        ("answer is (d)", "D"),
        (r"\boxed{A}", "A"),
        (r"\boxed{\text{A}}", "A"),
        ("<answer>E) because</answer>", "E"),
        ("A is wrong, B is wrong. The correct answer: C", "C"),
        ("I would go with option D", "D"),
        ("Not (A) but (B)", "B"),
        ("B) the second one", "B"),
        ("Final choice: \n\n A", "A"),
        ("nothing here", None),
        ("", None),
    ],
)
def test_a_choice_is_read_in_many_spellings(text: str, letter: str | None) -> None:
    assert choice_in(text) == letter


async def test_choice() -> None:
    assert await reward(ChoiceJudger(), "The answer is B.", "B") == 1.0
    assert await reward(ChoiceJudger(), "The answer is B.", "(b)") == 1.0
    assert await reward(ChoiceJudger(), "The answer is B.", 1) == 1.0
    assert await reward(ChoiceJudger(), "The answer is B.", "C") == 0.0
    with pytest.raises(DataError, match="none of the choices ABCD"):
        await ChoiceJudger("ABCD").judge(task("E"), said("E"))


def test_words_are_counted_as_squad_counts_them() -> None:
    assert squad_tokens("The  quick, BROWN fox's an\tapple!") == ["quick", "brown", "foxs", "apple"]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("the Eiffel Tower", "Eiffel Tower", 1.0),
        ("Eiffel", "Eiffel Tower", 2 / 3),
        ("<answer>Paris</answer> and much more", "Paris", 1.0),
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("b b", "b", 2 / 3),
        ("Rome", ["Paris", "Rome"], 1.0),
    ],
)
async def test_f1(text: str, answer: Any, score: float) -> None:
    assert (await F1Judger().judge(task(answer), said(text))).reward == pytest.approx(score)


async def test_from_the_threshold_on_an_f1_is_correct() -> None:
    verdict = await F1Judger(threshold=0.5).judge(task("Eiffel Tower"), said("Eiffel"))
    assert verdict.is_correct and verdict.reward == pytest.approx(2 / 3)


async def test_regex() -> None:
    fixed, by_task = RegexJudger(r"\d{4}", ignore_case=True), RegexJudger(whole=True)
    try:
        assert await reward(fixed, "in 1969", None) == 1.0
        assert await reward(fixed, "in 69", None) == 0.0
        assert await reward(by_task, "Paris", ["Rom.", "P.*s"]) == 1.0
        assert await reward(by_task, "Paris!", ["P.*s"]) == 0.0
        with pytest.raises(DataError, match="cannot be used"):
            await by_task.judge(task("(unclosed"), said("x"))
    finally:
        await fixed.close()
        await by_task.close()


MATH = [
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"so $x = \boxed{2\sqrt{2}}$", r"\sqrt{8}", True),
    ("#### 42", "42", True),
    ("<answer>x^2 + 2x + 1</answer>", "(x+1)^2", True),
    ("The answer is 7.", "7", True),
    ("The answer is 8.", "7", False),
    (r"\boxed{(1, 2)}", "(1,2)", True),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
    (r"\boxed{10\%}", "0.1", True),
    (r"\boxed{1,000}", "1000", True),
    (r"\boxed{}", "7", False),
    ("nothing", "7", False),
    ("7", ["8", "7"], True),
]


async def test_math() -> None:
    judger = MathJudger(workers=1)
    try:
        found = [await reward(judger, text, answer) for text, answer, _ in MATH]
        assert [(case[0], bool(right)) for case, right in zip(MATH, found, strict=True)] == [
            (text, right) for text, _, right in MATH
        ]
        with pytest.raises(DataError, match="cannot be read as mathematics"):
            await judger.judge(task(""), said(r"\boxed{7}"))
        verdict = await judger.judge(task("7"), said("x" * 10))
        assert verdict.metrics == {"answer_readable": 0.0, "judge_timed_out": 0.0}
    finally:
        await judger.close()


# ---- made of others --------------------------------------------------------------------------------------------------


class Fixed(Judger):
    """Always the same verdict."""

    def __init__(self, reward: float, correct: bool | None = None) -> None:
        self.verdict = Verdict(reward, correct, {"seen": 1.0})

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        return self.verdict


async def test_a_sum_weighs_its_parts_and_reports_each() -> None:
    parts = {"answer": Fixed(1.0, True), "form": {"name": "tests.none:x", "weight": 0.5}}
    with pytest.raises(ConfigError):
        WeightedSum(parts)
    judger = WeightedSum(
        {"answer": {"name": "exact", "weight": 2}, "form": {"name": "regex", "args": {"pattern": "a"}, "weight": 0.5}},
        correct="answer",
    )
    try:
        verdict = await judger.judge(task("b"), said("a"))
        assert verdict.reward == 0.5 and verdict.is_correct is False
        assert verdict.metrics["reward_answer"] == 0.0 and verdict.metrics["reward_form"] == 1.0
    finally:
        await judger.close()


async def test_a_part_may_be_an_object_and_the_first_decides_what_is_correct() -> None:
    verdict = await WeightedSum({"a": Fixed(0.25, True), "b": Fixed(-1.0, False)}).judge(task(), said(""))
    assert verdict == Verdict(-0.75, True, {"seen": 1.0, "reward_a": 0.25, "reward_b": -1.0})


async def test_a_part_that_does_not_say_is_correct_from_a_reward_of_1_on() -> None:
    for reward, correct in ((1.0, True), (0.5, False)):
        parts = {"a": Fixed(reward), "b": Fixed(9.0, True)}
        assert (await WeightedSum(parts).judge(task(), said(""))).is_correct is correct


async def test_a_part_that_fails_fails_the_sum_with_its_own_error() -> None:
    class Broken(Judger):
        async def judge(self, task: Task, episode: Episode) -> Verdict:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await WeightedSum({"a": Fixed(1.0), "b": Broken()}).judge(task(), said(""))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"parts": {}}, "needs parts"),
        ({"parts": {"a": Fixed(1.0)}, "correct": "b"}, 'the part "b"'),
        ({"parts": {"a": {"name": "exact", "weight": "2"}}}, "weight must be a number"),
        ({"parts": {"a": {"judger": "exact"}}}, "a table with a name"),
    ],
)
def test_a_sum_that_makes_no_sense_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        WeightedSum(**arguments)


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0.0), (60, 0.0), (80, -0.25), (100, -0.5), (150, -0.5)])
async def test_a_reply_that_is_too_long_loses_reward_in_a_straight_line(tokens: int, penalty: float) -> None:
    alone = OverlongPenalty(max_tokens=100, buffer=40, factor=0.5)
    assert (await alone.judge(task(), said("", tokens))).reward == pytest.approx(penalty)
    around = OverlongPenalty(100, 40, 0.5, judger=Fixed(1.0, True))
    verdict = await around.judge(task(), said("", tokens))
    assert verdict.reward == pytest.approx(1.0 + penalty) and verdict.is_correct
    assert verdict.metrics["overlong"] == (tokens > 60) and verdict.metrics["seen"] == 1.0


@pytest.mark.parametrize(
    "arguments",
    [{"max_tokens": 10, "buffer": 0}, {"max_tokens": 10, "buffer": 11}, {"max_tokens": 9, "buffer": 3, "factor": -1}],
)
def test_a_penalty_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        as_judger(OverlongPenalty, arguments)


@pytest.mark.parametrize(
    ("judger", "arguments"),
    [
        (ExactJudger, {"where": "nowhere"}),
        (NumericJudger, {"tolerance": -1}),
        (ChoiceJudger, {"choices": "XYZ"}),
        (RegexJudger, {"pattern": "("}),
        (MathJudger, {"workers": 0}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(judger: type[Judger], arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        as_judger(judger, arguments)
