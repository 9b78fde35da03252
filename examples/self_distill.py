"""Self-distillation: the model with a hint teaches itself to search step by step without the hint.

headrace train examples/self_distill.toml
"""

from headrace import Model, Step, Task, self_distill
from headrace.data.sources.countdown import HINT
from headrace.data.task import Message


def with_hint(task: Task, step: Step) -> list[Message]:
    """The prompt that only the teacher sees."""
    return [{"role": "user", "content": f"{task.instruction} {HINT}"}]


@self_distill(with_hint)
async def solve(task: Task, model: Model) -> None:
    """One call; the judger scores it, for the reward curve only."""
    await model.chat(task.messages)
