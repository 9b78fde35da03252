"""Two roles trained together: a solver, and a judge that says whether the solver is right.

headrace train examples/solver_judge.toml
"""

from dataclasses import replace

from headrace import Model, Task, Trajectory
from headrace.data.sources.countdown import check_question
from headrace.judge.countdown import evaluate, last_answer


async def solve_and_judge(task: Task, model: Model) -> list[Trajectory]:
    """The solver is rewarded for being right, the judge for knowing whether the solver was."""
    solution = await model.chat(task.messages, role="solver")
    answer = last_answer(solution.text)
    question = {"role": "user", "content": check_question(answer, task.answer)}
    opinion = await model.chat([question], role="judge", max_tokens=24)
    parsed = evaluate(answer)
    right = parsed is not None and sorted(parsed[0]) == sorted(task.metadata["numbers"]) and parsed[1] == task.answer
    rewards = {"solver": float(right), "judge": float(last_answer(opinion.text) == ("yes" if right else "no"))}
    return [replace(trajectory, reward=rewards[trajectory.name]) for trajectory in model.trajectories()]
