"""Ranks compute what one learner computes; checkpoints fit any number of them; a lost rank changes nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_cases import TIGHT, Case, difference, local_gradient, losses, new_group, new_learner, steps
from headrace.algorithms.batching import pack
from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.local.learner import Learner
from headrace.backends.ranks.base import Program, RanksLostError
from headrace.backends.ranks.pipes import PipeRanks
from headrace.errors import BackendError, DivergedError

CASES = {case.name: case for case in losses()}
PPO = CASES["ppo_clip"]
QUICK = ("ppo_clip", "value head")


def compare(case: Case, group: LearnerGroup, folder: Path) -> None:
    """Gradient of a batch, what was found in it, and weights after five steps."""
    learner = new_learner(case)
    learner.save(folder)
    group.load(folder)
    batch = case.batch(seed=1)
    one, many = (each.forward_backward(batch, case.algorithm) for each in (learner, group))
    assert difference(local_gradient(learner), group.together("gradient")[0]) < TIGHT
    assert one.rejected == many.rejected
    for ours, theirs in zip(one.logprobs, many.logprobs, strict=True):
        assert ours == pytest.approx(theirs, rel=TIGHT)
    assert one.metrics.reduce() == pytest.approx(
        many.metrics.reduce(), rel=1e-6, nan_ok=True
    )  # shares of clipped tokens are means in float32
    assert learner.optim_step(1e-3, 0.01).reduce() == pytest.approx(group.optim_step(1e-3, 0.01).reduce(), rel=TIGHT)
    assert steps(learner, case, range(2, 6)) == pytest.approx(steps(group, case, range(2, 6)), rel=1e-9)
    assert difference(learner.weights(), group.together("weights")[0]) < 1e-9
    scored = case.batch(seed=9)
    for ours, theirs in zip(learner.logprobs(scored), group.logprobs(scored, "policy"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    if case.valued:
        for ours, theirs in zip(learner.values(scored), group.values(scored), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_compute_what_one_learner_computes(name: str, tmp_path: Path) -> None:
    group = new_group(CASES[name].config(2))
    compare(CASES[name], group, tmp_path)
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_any_number_of_ranks_computes_what_one_learner_computes(name: str, ranks: int, tmp_path: Path) -> None:
    group = new_group(CASES[name].config(ranks))
    compare(CASES[name], group, tmp_path)
    group.close()


@pytest.mark.slow
def test_groups_that_hold_the_model_twice_over_compute_the_same(tmp_path: Path) -> None:
    config = PPO.config(4)
    group = new_group(config.model_copy(update={"backend": config.backend.model_copy(update={"shard": 2})}))
    compare(PPO, group, tmp_path)
    group.close()


def test_a_batch_of_fewer_rows_than_ranks_and_one_that_diverges(tmp_path: Path) -> None:
    learner, group = new_learner(PPO), new_group(PPO.config(2))
    learner.save(tmp_path)
    group.load(tmp_path)
    batch = PPO.batch(count=1)
    for each in (learner, group):
        each.forward_backward(batch, PPO.algorithm)
    assert difference(local_gradient(learner), group.together("gradient")[0]) < TIGHT
    bad = PPO.samples(0, 4)
    broken = torch.full((len(bad[2].advantages),), float("nan")).tolist()
    bad[2] = replace(bad[2], advantages=tuple(broken), task_id="the-broken-one")
    with pytest.raises(DivergedError, match="the-broken-one"):
        group.forward_backward(pack(bad, PPO.algorithm, 48), PPO.algorithm)
    with pytest.raises(BackendError, match="no accumulated gradient"):  # all ranks have forgotten it
        group.optim_step(1e-3, 1.0)
    group.close()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def trained(group: LearnerGroup | Learner) -> dict[str, torch.Tensor]:
    return group.together("weights")[0] if isinstance(group, LearnerGroup) else group.weights()


def reshard(case: Case, sizes: tuple[int, ...], folder: Path) -> None:
    """From one group to the next by checkpoints, without a change; each makes the step that the first one makes."""
    first = new_group(case.config(sizes[0]))
    steps(first, case, [1, 2])
    first.save(folder / "0")
    weights, before = trained(first), folder / "0"
    steps(first, case, [3])
    after = trained(first)
    first.close()
    for number, size in enumerate(sizes[1:], 1):
        group = new_group(case.config(size)) if size else Learner(case.config())
        group.load(before)
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained(group).items())
        before = folder / str(number)
        group.save(before)
        steps(group, case, [3])  # the optimizer's moments came along
        assert difference(after, trained(group)) < 1e-9
        if isinstance(group, LearnerGroup):
            group.close()


def test_a_checkpoint_of_two_ranks_is_read_by_the_local_learner_and_by_one_rank(tmp_path: Path) -> None:
    reshard(PPO, (2, 0, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_clip", "adapters", "value head"])
def test_checkpoints_fit_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    reshard(CASES[name], (2, 1, 4, 0, 2), tmp_path)


# ---- the loss of a rank ----------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_changes_nothing(tmp_path: Path) -> None:
    calm, hit = (new_group(PPO.config(2)) for _ in range(2))
    for group in (calm, hit):
        steps(group, PPO, [1])
        group.save(tmp_path / "partial")
        (tmp_path / "partial").rename(tmp_path / "saved")
        group.saved(tmp_path / "saved")
        steps(group, PPO, [2])
        (tmp_path / "saved").rename(tmp_path / ("calm" if group is calm else "hit"))
        group.saved(tmp_path / ("calm" if group is calm else "hit"))
        steps(group, PPO, [3])
    hit.forward_backward(PPO.batch(4), PPO.algorithm)
    calm.forward_backward(PPO.batch(4), PPO.algorithm)
    os.kill(pids(hit)[1], signal.SIGKILL)
    for group in (calm, hit):
        group.forward_backward(PPO.batch(5), PPO.algorithm)
        group.optim_step(1e-3, 0.01)
    assert hit.restarts == 1 and calm.restarts == 0
    assert all(torch.equal(tensor, trained(hit)[name]) for name, tensor in trained(calm).items())
    calm.close()
    hit.close()


def pids(group: LearnerGroup) -> list[int]:
    assert isinstance(group.ranks, PipeRanks)
    return group.ranks.pids


class Sleepy:
    """A program whose ranks wait for each other as in a collective, where one of them may not come."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank

    def wait(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def fail(self, where: int) -> None:
        if self.rank == where:
            raise ZeroDivisionError("a bug")

    def refuse(self) -> None:
        raise BackendError("all refuse")


def sleepy(timeout_s: float) -> PipeRanks:
    # a file of its own would be found by its path in the ranks
    ranks = PipeRanks(Program(f"{__file__}:Sleepy"), 2, timeout_s, [{"PYTHONPATH": os.pathsep.join(_paths())}] * 2)
    ranks.start()
    return ranks


def _paths() -> list[str]:
    tests = str(Path(__file__).parents[1])
    return [tests, *filter(None, [os.environ.get("PYTHONPATH")])]


def test_ranks_that_hang_are_ended_with_their_stacks_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ranks = sleepy(timeout_s=2.0)
    assert ranks.call("wait", [0.0, 0.0]) == [0, 1]
    with pytest.raises(RanksLostError, match="rank 1 did not answer in wait"):
        ranks.call("wait", [0.0, 60.0])
    assert "rank 1 hangs in wait" in caplog.text and "in _read" in caplog.text and "line" in caplog.text
    with pytest.raises(RanksLostError, match="start them again"):
        ranks.call("wait", [0.0, 0.0])


def test_an_error_of_ours_leaves_the_group_as_it_was_and_a_bug_ends_it() -> None:
    ranks = sleepy(timeout_s=30.0)
    with pytest.raises(BackendError, match="all refuse"):
        ranks.call("refuse")
    assert ranks.call("wait", [0.0, 0.0]) == [0, 1]
    with pytest.raises(RanksLostError, match="fail failed on rank 1 of 2: ZeroDivisionError: a bug"):
        ranks.call("fail", [1, 1])


def test_ranks_end_with_their_controller() -> None:
    ranks = sleepy(timeout_s=30.0)
    asked = threading.Thread(target=lambda: _quietly(ranks), daemon=True)
    asked.start()
    time.sleep(0.5)
    processes = [worker._process for worker in ranks._workers]
    for worker in ranks._workers:
        worker.connection.shutdown(2)  # what the end of this process does to it
    assert [process.wait(10) for process in processes] == [0, 0]  # in the middle of a call


def _quietly(ranks: PipeRanks) -> Any:
    try:
        ranks.call("wait", [60.0, 60.0])
    except (RanksLostError, OSError, ValueError):
        return None
