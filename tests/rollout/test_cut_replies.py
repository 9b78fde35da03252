"""A call of a workflow that sets top_p or top_k: refused where the learner would compare it with the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.data.task import Task
from headrace.errors import DataError
from headrace.rollout.model_client import Model
from null_backend import Ran, null_run

RECOMPUTE = {"algorithm": {"proximal": "recompute"}}


def ran(folder: Path, sampling: dict[str, Any], role: str = "agent", **given: Any) -> Ran:
    async def asks(task: Task, model: Model) -> float:
        given: dict[str, Any] = sampling if model.training else {"top_p": 0.5}
        reply = await model.chat(task.messages, role=role, **given)
        await model.chat(task.messages)
        return float(sum(reply.completion_ids) % 5)

    dev = {"dev": {"tasks": "countdown", "args": {"count": 2}}}
    return null_run(folder, asks, trainer={"steps": 1}, eval={"sets": dev, "after": True}, **given)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 20}])
def test_a_call_that_cuts_the_distribution_fails_its_episode_with_the_remedy(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    given = ", ".join(f"{name}={value}" for name, value in sampling.items())
    with pytest.raises(DataError, match=f'a call with {given} cuts .* or set algorithm.proximal = "recompute"'):
        ran(tmp_path, sampling)


@pytest.mark.parametrize(
    "given",
    [
        {"sampling": {"top_p": 1.0, "top_k": 0}},
        {"sampling": {"top_p": 0.9}, **RECOMPUTE},
        {"sampling": {"top_p": 0.9}, "algorithm": {"loss": "reinforce"}},
        {"sampling": {"top_k": 5}, "role": "helper", "algorithm": {"roles": {"helper": {"train": False}}}},
    ],
)
def test_a_call_may_cut_what_nothing_compares_with_the_sampler(tmp_path: Path, given: dict[str, Any]) -> None:
    rows = ran(tmp_path, **given).rows
    assert rows[-1]["episodes/failed"] == 0
    assert [row["eval/dev/failed"] for row in rows if "eval/dev/failed" in row] == [0]  # evaluations always may
