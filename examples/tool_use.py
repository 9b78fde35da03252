"""Tools for an agent: a calculator and a price list."""

from __future__ import annotations

import random
from collections.abc import Iterator

from headrace import Task
from headrace.judge.countdown import evaluate

PRICES = {"apple": 3, "bread": 5, "cheese": 9, "dates": 7, "eggs": 4}


def price(item: str) -> int:
    """Look up the price of an item."""
    if item not in PRICES:
        raise ValueError(f"the shop has no {item}; it has {', '.join(PRICES)}")
    return PRICES[item]


def calculate(expression: str) -> str:
    """Evaluate an expression of integers with +, -, *, / and parentheses."""
    made = evaluate(expression)
    if made is None:
        raise ValueError(f"{expression!r} is not an arithmetic expression")
    return str(made[1])


def shopping(count: int, seed: int = 0) -> Iterator[Task]:
    """Questions that need both tools."""
    rng = random.Random(seed)
    for number in range(count):
        item, other = rng.sample(sorted(PRICES), 2)
        first, second = rng.randint(2, 9), rng.randint(2, 9)
        yield Task(
            id=str(number),
            instruction=f"What do {first} {item} and {second} {other} cost? Answer with the number.",
            answer=first * PRICES[item] + second * PRICES[other],
            source="shop",
        )
