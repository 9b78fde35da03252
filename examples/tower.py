"""A small text game of several turns: a tower with a riddle on every floor. The first wrong answer ends the climb."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace import Task
from headrace.data.task import load_tasks
from headrace.judge.countdown import evaluate, last_answer


class Tower:
    """Each floor asks to make a number from others; who is right is asked the next. The reward is the share climbed."""

    def reset(self, task: Task) -> str:
        """The riddle of the first floor."""
        self._floors: list[dict[str, Any]] = task.metadata["floors"]
        self._climbed = 0
        return self._riddle()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Up one floor if the answer is right."""
        floor = self._floors[self._climbed]
        made = evaluate(last_answer(action))
        if made is None or (sorted(made[0]), made[1]) != (sorted(floor["numbers"]), floor["target"]):
            return "Wrong.", 0.0, True, {"is_correct": False, "metrics": {"floors": self._climbed}}
        self._climbed += 1
        top = self._climbed == len(self._floors)
        observation = "You are at the top." if top else self._riddle()
        return observation, 1 / len(self._floors), top, {"is_correct": top, "metrics": {"floors": self._climbed}}

    def _riddle(self) -> str:
        return self._floors[self._climbed]["riddle"]


def towers(split: str, count: int, height: int = 3) -> Iterator[Task]:
    """Towers of so many floors; no riddle of "test" is ever one of "train"."""
    riddles = load_tasks("countdown", split=split, count=count * height)
    for number in range(count):
        floors = [{**riddle.metadata, "riddle": riddle.instruction} for riddle in riddles[number * height :][:height]]
        yield Task(
            id=f"tower {number}",
            instruction=" ".join(floor["riddle"] for floor in floors),
            source="tower",
            metadata={"floors": floors},
        )
