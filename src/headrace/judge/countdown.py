"""Countdown: combine the given numbers, each exactly once, to reach the target. The answer stands in <answer> tags."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.judge.base import Judger, Verdict
from headrace.judge.extract import in_tags

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200  # characters; no honest answer is longer, and it bounds the parser


class CountdownJudger(Judger):
    """1 for a right answer, `format_reward` for a well-formed one that misses the target, else 0."""

    def __init__(self, format_reward: float = 0.0) -> None:
        self._format_reward = format_reward

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        parsed = evaluate(last_answer(episode.text))
        if parsed is None or sorted(parsed[0]) != sorted(task.metadata["numbers"]):
            return Verdict(0.0, is_correct=False, metrics={"well_formed": 0.0})
        correct = parsed[1] == task.metadata["target"]
        return Verdict(1.0 if correct else self._format_reward, is_correct=correct, metrics={"well_formed": 1.0})


def last_answer(text: str) -> str:
    """What stands in the last pair of <answer> tags."""
    return in_tags(text) or ""  # no pattern: on many open tags it would take quadratic time


def evaluate(expression: str) -> tuple[list[int], Fraction] | None:
    """(numbers used, exact value) of an arithmetic expression, or None if it is anything else."""
    if not expression or len(expression) > _LONGEST:
        return None
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{type(node).__name__} is not arithmetic")

    try:
        return numbers, value(ast.parse(expression.replace("×", "*"), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
