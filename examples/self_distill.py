"""Self-distillation: the same model, shown how a solution begins, teaches itself to begin that way.

headrace train examples/self_distill.toml
"""

from headrace import Model, Step, Task, self_distill
from headrace.data.task import Message


def with_hint(task: Task, step: Step) -> list[Message]:
    """What only the teacher sees: the first line of a worked search."""
    first, second = task.metadata["numbers"][:2]
    return [*task.messages, {"role": "assistant", "content": f"{first}+{second}={first + second}"}, *task.messages]


@self_distill(with_hint)
async def solve(task: Task, model: Model) -> None:
    """Ask once; the judger decides, for the reward curve only."""
    await model.chat(task.messages)
