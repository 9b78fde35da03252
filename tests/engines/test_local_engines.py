"""The local backend with an engine in a process of its own: the backend contract, publications that fail, threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contracts.backend_contract import BackendContract
from contracts.engine_harness import soon
from fork_server import ForkServer
from headrace.backends.local import engines
from headrace.backends.local.backend import LocalBackend
from headrace.config.loading import build_config
from headrace.engines.base import SamplingParams
from headrace.engines.process.engine import ProcessEngine
from headrace.errors import ConfigError, WeightSyncError
from headrace.weights.shared_memory import SharedWeights

SEPARATE = {"trainer": {"placement": "separate"}}


@pytest.fixture
def by_fork(forks: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes that start at once."""
    monkeypatch.setattr(
        engines, "ProcessEngine", lambda learner, options: ProcessEngine(learner, options, forks.launch)
    )


@pytest.mark.usefixtures("by_fork")
class TestSeparateEngine(BackendContract):
    def make_backend(self, **changes: Any) -> LocalBackend:
        return LocalBackend(build_config({**SEPARATE, **changes}))


@pytest.mark.usefixtures("by_fork")
async def test_a_weight_sync_that_does_not_arrive_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(build_config(SEPARATE))
    engine = backend.create_engine()
    await soon(backend.publish(1))
    monkeypatch.setattr(SharedWeights, "write", lambda self, buffer: None)
    with torch.no_grad():
        next(backend.hf_model.parameters()).view(-1)[5] += 1e-3
    with pytest.raises(WeightSyncError, match=rf"version 2 did not arrive.*{backend.fingerprint()}"):
        await soon(backend.publish(2))
    await engine.close()
    await backend.close()


async def test_a_shared_engine_that_decodes_with_a_stale_copy_is_found_out() -> None:
    """A parameter that was moved elsewhere, while the fused weights still read the old memory."""
    backend = LocalBackend(build_config({}))
    engine = backend.create_engine()
    await soon(backend.publish(1))
    weight = backend.hf_model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data + 1e-3
    with pytest.raises(WeightSyncError, match="version 2 did not arrive"):
        await soon(backend.publish(2))
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
    for placement in ({}, SEPARATE):
        backend = LocalBackend(build_config({**placement, **changes}))
        engine = backend.create_engine()
        with torch.no_grad():
            for parameter in backend.hf_model.parameters():
                parameter *= 1.01 if parameter.requires_grad else 1
        publication = await soon(backend.publish(1))
        generation = await soon(engine.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True), 3))
        said.append((publication, generation.completion_ids, generation.versions))
        await engine.close()
        await backend.close()
    assert said[0] == said[1]


def test_a_length_above_the_models_own_is_refused_before_anything_starts() -> None:
    backend = LocalBackend(build_config({**SEPARATE, "engine": {"max_model_length": 10**7}}))
    with pytest.raises(ConfigError, match="max_model_length is 10000000"):
        backend.create_engine()


def test_threads_are_shared_out_between_learner_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_cores", lambda: 8)

    def shares(engine: int, learner: int) -> tuple[int, int]:
        config = build_config({**SEPARATE, "engine": {"threads": engine}, "backend": {"threads": learner}})
        engines.check_threads(config)
        return engines._engine_threads(config), engines.learner_threads(config)

    assert [shares(0, 0), shares(6, 0), shares(0, 1), shares(9, 0)] == [(4, 4), (6, 2), (4, 1), (9, 1)]
    assert engines.learner_threads(build_config({})) == 0
    monkeypatch.setattr(engines, "_cores", lambda: 1)
    assert shares(0, 0) == (1, 1)


def test_threads_of_an_engine_that_has_none_of_its_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.threads = 2 has no effect.*set backend\.threads"):
        LocalBackend.check(build_config({"engine": {"threads": 2}}))


def test_the_weights_of_a_learner_apart_are_one_piece_of_memory() -> None:
    """Many small copies go at half the speed of one large one."""
    backend = LocalBackend(build_config(SEPARATE))
    pieces = {p.untyped_storage().data_ptr() for p in backend.hf_model.parameters()}
    fused = {tensor.untyped_storage().data_ptr() for tensor in backend.model.weights()}
    assert len(pieces) == 1 and fused == pieces
    weights = SharedWeights(backend.hf_model)
    assert len(weights._slices) == 1
    weights.close()
