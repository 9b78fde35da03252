"""Backend "fsdp" passes the backend contract: on a thread, as processes, and as Ray actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from contracts.backend_contract import IMITATE, BackendContract, random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.fsdp.backend import FsdpBackend
from headrace.backends.setup import attach_engine, choose
from headrace.config import RunConfig
from headrace.config.loading import build_config

pytestmark = pytest.mark.usefixtures("forked_ranks")


class FsdpContract(BackendContract):
    ranks: ClassVar[int]
    settings: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        backend = {"name": "fsdp", "ranks": cls.ranks}
        cls.settings = {"trainer": {"placement": "separate"}, **cls.settings, "backend": backend}

    def make_backend(self, config: RunConfig) -> FsdpBackend:
        torch.set_num_threads(1)
        return FsdpBackend(config)


class TestOneRankOnAThread(FsdpContract):
    ranks = 1


@pytest.mark.slow
class TestTwoRanks(FsdpContract):
    ranks = 2


@pytest.mark.slow
class TestTwoRanksInFloat64(FsdpContract):
    ranks = 2
    tolerance = 1e-10
    settings: ClassVar[dict[str, Any]] = {"model": {"dtype": "float64"}}


@pytest.mark.slow
class TestTwoRanksWithAdapters(FsdpContract):
    ranks = 2
    settings: ClassVar[dict[str, Any]] = {"model": {"lora": {"rank": 4}}}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_the_forward_computes_in_bfloat16_and_what_the_optimizer_updates_is_float32(
    ranks: int, tmp_path: Path
) -> None:
    settings = {
        "model": {"dtype": "bfloat16"},
        "backend": {"name": "fsdp", "ranks": ranks},
        "trainer": {"placement": "separate"},
    }
    config = build_config(settings)
    backend = FsdpBackend(config)
    policy = attach_engine(config, backend, choose(config))
    samples = random_samples(8, 90)
    batch = pack(samples, IMITATE, 512)
    before = await backend.compute_logprobs(batch)
    for _ in range(5):
        await backend.forward_backward(batch, IMITATE)
        await backend.optim_step(1e-3, grad_scale([batch], IMITATE))
    after = await backend.compute_logprobs(batch)
    assert sum(map(sum, after)) > sum(map(sum, before))
    await policy.sync.sync(1)  # the engine has the same bits, in bfloat16
    weights = backend.group.together("weights")[0]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    await backend.save(tmp_path / "saved")
    await backend.forward_backward(batch, IMITATE)
    await backend.optim_step(1e-3, grad_scale([batch], IMITATE))
    await backend.load(tmp_path / "saved")
    loaded = backend.group.together("weights")[0]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    await policy.engine.close()
    await backend.close()
