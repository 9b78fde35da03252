"""Few-shot prompts, so that a small model knows the format of an answer.

headrace train examples/arithmetic_smollm2.toml
"""

from headrace import Model, Task

QUESTION = "State the final answer to the following arithmetic problem: "
SHOTS = (("4 + 3 =", "7"), ("9 - 2 =", "7"), ("3 - 8 =", "-5"), ("8 + 6 =", "14"))


async def few_shot(task: Task, model: Model) -> None:
    """One reply; the judger scores it."""
    shown = [
        {"role": role, "content": content}
        for question, answer in SHOTS
        for role, content in (("user", QUESTION + question), ("assistant", answer))
    ]
    await model.chat([*shown, *task.messages])
