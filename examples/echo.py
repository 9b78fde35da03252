"""A small text game of several turns: a caller names numbers, one per turn, and the model repeats each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from headrace import Task
from headrace.judge.countdown import evaluate, last_answer

A_NUMBER = 0.1  # reward of a wrong number: better than none


class Echo:
    """One game. Each turn is scored by itself."""

    def reset(self, task: Task) -> str:
        """The first call."""
        self._calls: list[int] = task.metadata["calls"]
        self._turn = self._right = 0
        return self._call()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """An answer, and the next call."""
        made = evaluate(last_answer(action))
        right = made is not None and made[1] == self._calls[self._turn]
        self._turn += 1
        self._right += right
        done = self._turn == len(self._calls)
        info = {"is_correct": self._right == len(self._calls), "metrics": {"right": self._right / self._turn}}
        reward = 1.0 if right else A_NUMBER if made is not None else 0.0
        return "" if done else self._call(), reward, done, info

    def _call(self) -> str:
        number = self._calls[self._turn]
        return f"Make {number} from {number}. Use each number once."


def games(split: str, count: int, turns: int = 2, highest: int = 9) -> Iterator[Task]:
    """Games of `turns` turns. No sequence of calls is in both "train" and "test"."""
    rng = random.Random(split)
    made = 0
    while made < count:
        calls = [rng.randint(1, highest) for _ in range(turns)]
        if (sum(calls) % 5 == 0) != (split == "test"):
            continue
        made += 1
        text = " ".join(map(str, calls))
        yield Task(id=f"{split} {made}", instruction=f"Echo {text}.", source="echo", metadata={"calls": calls})
