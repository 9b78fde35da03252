"""The vLLM engine against a scripted server: the engine contract, faults of a sync, memory, what is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scripted_servers import SMOKE, VllmServer, detokenize, new_engine, new_sync
from scripted_vllm import VOCABULARY, ToyModel, row_table

from contracts.engine_contract import EngineContract
from contracts.engine_harness import soon
from headrace.engines.base import SamplingParams
from headrace.engines.vllm.engine import VllmEngine
from headrace.errors import ConfigError, DataError, WeightSyncError
from headrace.weights.digest import weight_digest
from headrace.weights.sync import WeightSync


class TestScriptedVllm(EngineContract):
    vocabulary = VOCABULARY
    draws = 300
    pins = False
    model_logprobs = False
    others = 15

    @pytest.fixture(autouse=True)
    def on_a_toy(self) -> None:
        self.model = ToyModel()
        self.servers: list[VllmServer] = []

    def make_engine(self, **options: Any) -> VllmEngine:
        recompute = options.pop("cache_on_publish", "keep") == "recompute"
        options.pop("prefill_tokens", None)
        max_batch = options.pop("max_batch", 64)
        self.servers.append(VllmServer(self.model, max_batch=max_batch))
        options["eos_ids"] = tuple(options.get("eos_ids", ()))
        return new_engine(self.servers[-1], recompute=recompute, max_batch=max_batch, **options)

    def new_sync(self, engine: VllmEngine) -> WeightSync:
        return new_sync(engine, self.model)

    def reference_logprobs(self, ids: Sequence[int]) -> np.ndarray:
        return row_table(self.model.arrays(), ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return detokenize(ids)

    def change_weights(self) -> None:
        self.model.move(99)

    def digest(self) -> str:
        return weight_digest(self.model.parameters())

    def break_model(self) -> str:
        self.dying = [asyncio.ensure_future(server.running.die()) for server in self.servers]
        return SMOKE


# ---- proofs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nothing", "still decodes with the weights of version 1: the sync changed nothing"),
        ("stale_head", "all tensors arrived, so it decodes with a stale copy of some"),
        ("drops", "1 of 2 tensors did not arrive at .* as they were sent: head;"),
    ],
)
async def test_a_fault_of_a_sync_is_an_error_that_says_which(fault: str, says: str) -> None:
    model = ToyModel()
    server = VllmServer(model)
    engine = new_engine(server)
    sync = new_sync(engine, model)
    await soon(sync.sync(1))
    server.running.fault = fault
    model.move(5)
    waiting = asyncio.ensure_future(engine.generate([3, 4], SamplingParams(max_tokens=3), 1))
    with pytest.raises(WeightSyncError, match=says):
        await soon(sync.sync(2))
    await asyncio.sleep(0.05)
    assert not waiting.done()  # nothing that was sampled with such weights is delivered
    assert engine.health().paused
    waiting.cancel()
    await engine.close()


async def test_the_proof_of_a_good_sync_is_a_small_difference() -> None:
    model = ToyModel()
    engine = new_engine(VllmServer(model))
    sync = new_sync(engine, model)
    for version in (1, 2, 3):
        model.move(version)
        assert (await soon(sync.sync(version))).version == version
        assert sync.canary_difference is not None and sync.canary_difference < 1e-6
    await engine.close()


async def test_a_logprob_that_is_no_number_fails_its_request_alone() -> None:
    server = VllmServer(ToyModel())
    engine = new_engine(server)
    await soon(engine.generate([3], SamplingParams(max_tokens=2), 1))
    server.running.fault = "non_finite"
    with pytest.raises(DataError, match="log-probability -9999"):
        await soon(engine.generate([3], SamplingParams(max_tokens=2), 1))
    server.running.fault = ""
    assert len((await soon(engine.generate([3], SamplingParams(max_tokens=2), 1))).completion_ids) == 2
    await engine.close()


# ---- memory ----------------------------------------------------------------------------------------------------------


async def test_a_colocated_server_sleeps_while_the_learner_works() -> None:
    model = ToyModel()
    server = VllmServer(model)
    engine = new_engine(server, sleeps=True)
    sync = new_sync(engine, model)
    await soon(sync.sync(1))
    server.running.calls.clear()
    await soon(engine.pause())
    await soon(engine.release_cache())
    model.move(3)
    await soon(sync.sync(2))
    assert engine.health().paused
    await soon(engine.resume())
    order = [path.strip("/") for path in server.running.calls if path not in ("/metrics",)]
    assert order[:4] == ["pause", "sleep", "wake_up", "pause"]
    assert order[4:8] == ["start_weight_update", "update_weights", "finish_weight_update", "update_weight_version"]
    assert order[-1] == "resume"
    made = await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))
    assert set(made.versions) == {2}
    await engine.close()


# ---- what is checked -------------------------------------------------------------------------------------------------


async def test_a_server_that_lacks_something_is_refused_with_the_remedy() -> None:
    server = VllmServer(ToyModel())
    await server.start()
    server.running.routes_missing = {"/start_weight_update"}
    engine = new_engine(server)
    server.start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"has no /start_weight_update; start it with VLLM_SERVER_DEV_MODE=1"):
        await soon(engine.generate([3], SamplingParams(), 1))
    await engine.close()


async def test_raw_logprobs_are_refused() -> None:
    server = VllmServer(ToyModel())
    await server.start()
    server.running.raw_logprobs = True
    engine = new_engine(server)
    server.start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        await soon(engine.generate([3], SamplingParams(), 1))
    await engine.close()
