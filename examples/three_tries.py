"""A text game of several turns: make a number from others, with three tries; a wrong one is told what it makes."""

from __future__ import annotations

from typing import Any

from headrace import Task
from headrace.judge.countdown import evaluate, last_answer

WORTH = (1.0, 0.8, 0.6)  # of the right answer at the first try, the second, the third


class ThreeTries:
    """One game."""

    def reset(self, task: Task) -> str:
        """The riddle."""
        self._riddle = str(task.instruction)
        self._numbers, self._target = sorted(task.metadata["numbers"]), task.metadata["target"]
        self._tries = 0
        return self._riddle

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """A try."""
        made = evaluate(last_answer(action))
        fits = made is not None and sorted(made[0]) == self._numbers
        right = made is not None and fits and made[1] == self._target
        worth = WORTH[self._tries] if right else 0.0
        self._tries += 1
        hint = f"That makes {made[1]}." if made is not None and fits else "That is no answer."
        info = {"is_correct": right, "metrics": {"right_at_first": float(right and self._tries == 1)}}
        return f"{hint} {self._riddle}", worth, right or self._tries == len(WORTH), info
