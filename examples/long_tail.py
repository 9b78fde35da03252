"""An agent with a tool that is usually fast and sometimes very slow: the case for asynchronous training."""

from __future__ import annotations

import asyncio
import random

from headrace import Model, Task


class LongTail:
    """Calls the model, then waits for a tool (a search, a test suite) before the answer is judged.

    A fixed share `slow_share` of the tasks waits `slow_factor` times as long as the others.
    """

    def __init__(self, wait_s: float = 0.3, slow_share: float = 0.1, slow_factor: float = 12.0) -> None:
        self._wait_s = wait_s
        self._slow_share = slow_share
        self._slow_factor = slow_factor

    def tool_s(self, task: Task) -> float:
        """How long the tool takes for this task: up to a third more or less than usual."""
        rng = random.Random(task.id)
        factor = self._slow_factor if rng.random() < self._slow_share else 1.0
        return self._wait_s * factor * rng.uniform(2 / 3, 4 / 3)

    async def run(self, task: Task, model: Model) -> None:
        await model.chat(task.messages)
        if model.training:
            await asyncio.sleep(self.tool_s(task))
