"""Self-distillation: the same model, asked to search step by step, teaches itself to search without being asked.

headrace train examples/self_distill.toml
"""

from headrace import Model, Step, Task, self_distill
from headrace.data.sources.countdown import HINT
from headrace.data.task import Message


def with_hint(task: Task, step: Step) -> list[Message]:
    """What only the teacher reads."""
    return [{"role": "user", "content": f"{task.instruction} {HINT}"}]


@self_distill(with_hint)
async def solve(task: Task, model: Model) -> None:
    """Ask once; the judger decides, for the reward curve only."""
    await model.chat(task.messages)
