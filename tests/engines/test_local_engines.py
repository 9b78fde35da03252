"""The local backend with the built-in engines: the backend contract, weight syncs that fail, threads."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from contracts.backend_contract import BackendContract
from contracts.engine_harness import soon
from fork_server import ForkServer
from headrace.backends.local.backend import LocalBackend
from headrace.backends.setup import attach_engine, choose
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.engines import builtin, placement
from headrace.engines.base import RolloutEngine, SamplingParams
from headrace.engines.process.engine import ProcessEngine
from headrace.errors import ConfigError, WeightSyncError
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync

SEPARATE: dict[str, Any] = {"trainer": {"placement": "separate"}}


@pytest.fixture
def by_fork(forks: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes that start at once."""
    monkeypatch.setattr(
        builtin, "ProcessEngine", lambda weights, options: ProcessEngine(weights, options, forks.launch)
    )


def connected(**sections: Any) -> tuple[LocalBackend, RolloutEngine, WeightSync]:
    """A backend with its engine, and what syncs the weights."""
    config = build_config(sections)
    backend = LocalBackend(config)
    policy = attach_engine(config, backend, choose(config))
    return backend, policy.engine, policy.sync


@pytest.mark.usefixtures("by_fork")
class TestSeparateEngine(BackendContract):
    settings: ClassVar[dict[str, Any]] = SEPARATE

    def make_backend(self, config: RunConfig) -> LocalBackend:
        return LocalBackend(config)


async def changed(backend: LocalBackend) -> str:
    """Change one weight; the digest of all."""
    with torch.no_grad():
        next(backend.learner.hf_model.parameters()).view(-1)[5] += 1e-3
    return await backend._weights.digest()


@pytest.mark.usefixtures("by_fork")
async def test_a_sync_that_did_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, engine, sync = connected(**SEPARATE)
    await soon(sync.sync(1))  # into the one buffer,
    await soon(sync.sync(2))  # and into the other: both hold what the model was loaded with
    monkeypatch.setattr(SharedWeights, "write", lambda self, buffer: None)
    ours = await changed(backend)
    with pytest.raises(WeightSyncError, match=rf"version 3 did not arrive.*{ours}.*still decodes with .* version 2"):
        await soon(sync.sync(3))
    await engine.close()
    await backend.close()


@pytest.mark.usefixtures("by_fork")
@pytest.mark.parametrize("rank", [0, 4])
async def test_a_tensor_that_was_dropped_on_the_way_is_an_error(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, engine, sync = connected(**SEPARATE, model={"lora": {"rank": rank}})
    await soon(sync.sync(1))
    with torch.no_grad():
        for parameter in backend.learner.hf_model.parameters():
            parameter += 0.01 * parameter.requires_grad
    write = SharedWeights.write

    def drop_one(self: SharedWeights, buffer: int) -> None:
        slot = self.layout.slots[-1]
        end = slot.start + math.prod(slot.shape) * slot.dtype.itemsize
        kept = self._maps[buffer][slot.start : end]
        write(self, buffer)
        self._maps[buffer][slot.start : end] = kept

    monkeypatch.setattr(SharedWeights, "write", drop_one)
    with pytest.raises(WeightSyncError, match=r"version 2 did not arrive: .* some are missing or changed"):
        await soon(sync.sync(2))
    await engine.close()
    await backend.close()


@pytest.mark.usefixtures("by_fork")
async def test_an_engine_that_goes_on_with_old_weights_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, engine, sync = connected(**SEPARATE)
    await soon(sync.sync(1))
    await changed(backend)
    take = SharedWeights.take_reserved
    monkeypatch.setattr(SharedWeights, "take_reserved", lambda self: take(self) * 0 + 1)  # the buffer of version 1
    with pytest.raises(WeightSyncError, match=r"version 2 did not arrive: .* still decodes with .* version 1"):
        await soon(sync.sync(2))
    await engine.close()
    await backend.close()


async def test_a_shared_engine_that_decodes_with_a_stale_copy_is_found_out() -> None:
    """A parameter that was moved elsewhere, while the fused weights still read the old memory."""
    backend, engine, sync = connected()
    await soon(sync.sync(1))
    weight = backend.learner.hf_model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data + 1e-3
    with pytest.raises(WeightSyncError, match=r"version 2 did not arrive: .* still decodes with .* version 1"):
        await soon(sync.sync(2))
    await engine.close()
    await backend.close()


@pytest.mark.usefixtures("by_fork")
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"estimator": "gae", "value_head": True}},  # a head that no engine needs
        {"run": {"deterministic": True}},
        {"model": {"lora": {"rank": 4}}, "run": {"deterministic": True}},
    ],
)
async def test_a_separate_engine_says_what_a_shared_one_says(changes: dict[str, Any]) -> None:
    said = []
    for where in ({}, SEPARATE):
        backend, engine, sync = connected(**where, **changes)
        with torch.no_grad():
            for parameter in backend.learner.hf_model.parameters():
                parameter *= 1.01 if parameter.requires_grad else 1
        synced = await soon(sync.sync(1))
        generation = await soon(engine.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True), 3))
        said.append((synced, generation.completion_ids, generation.versions))
        await engine.close()
        await backend.close()
    assert said[0] == said[1]


def test_a_length_above_the_models_own_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="max_model_length is 10000000"):
        connected(**SEPARATE, engine={"max_model_length": 10**7})


def test_threads_are_shared_out_between_learner_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_cores", lambda: 8)

    def shares(engine: int, learner: int) -> tuple[int, int]:
        config = build_config({**SEPARATE, "engine": {"threads": engine}, "backend": {"threads": learner}})
        placement.check_threads(config)
        return placement.engine_threads(config), placement.learner_threads(config)

    assert [shares(0, 0), shares(6, 0), shares(0, 1), shares(9, 0)] == [(4, 4), (6, 2), (4, 1), (9, 1)]
    assert placement.learner_threads(build_config({})) == 0
    monkeypatch.setattr(placement, "_cores", lambda: 1)
    assert shares(0, 0) == (1, 1)


def test_threads_of_an_engine_that_has_none_of_its_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.threads = 2 has no effect.*set backend\.threads"):
        LocalBackend.check(build_config({"engine": {"threads": 2}}))


def test_the_weights_of_a_learner_apart_are_one_piece_of_memory() -> None:
    """Many small copies go at half the speed of one large one."""
    backend = LocalBackend(build_config(SEPARATE))
    pieces = {p.untyped_storage().data_ptr() for p in backend.learner.hf_model.parameters()}
    fused = {tensor.untyped_storage().data_ptr() for tensor in backend.learner.model.weights()}
    assert len(pieces) == 1 and fused == pieces
    weights = SharedWeights(ModelWeights(backend.learner.hf_model))
    assert len(weights._slices) == 1
    weights.close()
