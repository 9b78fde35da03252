"""The vLLM engine against a scripted server: the engine contract, faults of a sync, lost servers, what is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scripted_vllm import VOCABULARY, ScriptedVllm, ToyModel, row_table

from contracts.engine_contract import EngineContract
from contracts.engine_harness import soon, under_way, until
from headrace.engines.base import SamplingParams
from headrace.engines.servers.client import ServerClient
from headrace.engines.servers.life import ServerOptions
from headrace.engines.vllm.engine import VllmEngine
from headrace.errors import ConfigError, DataError, EngineError, ServerLostError, WeightSyncError
from headrace.weights.canary import Canary, canary_rows
from headrace.weights.digest import weight_digest
from headrace.weights.sender import ServerSender
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync
from headrace.weights.transfers.file import FileTransfer

LENGTH = 255
SMOKE = "smoke came out of the server"


def detokenize(ids: Sequence[int]) -> str:
    return "".join(f"[{token}]" for token in ids)


class ScriptedServer:
    """A server that is started anew as often as `lives` allows."""

    url = ""
    new: type[ScriptedVllm] = ScriptedVllm

    def __init__(self, model: ToyModel, lives: int = 1, **options: Any) -> None:
        self._model, self._lives, self._options = model, lives, options
        self.incarnation = 0
        self.scripted: Any = None

    @property
    def running(self) -> Any:
        assert self.scripted is not None
        return self.scripted

    async def start(self) -> None:
        self._lives -= 1
        fresh = self.new(ToyModel().arrays() if self.incarnation else self._model.arrays(), **self._options)
        self.scripted = await fresh.start()
        self.url = self.scripted.url

    async def replace(self) -> None:
        if not self._lives:
            raise EngineError(SMOKE)
        self.incarnation += 1
        await self.start()

    def gone(self) -> str | None:
        return None

    def answered(self) -> None: ...

    async def close(self) -> None:
        if self.scripted is not None:
            await self.scripted.die()


def new_engine(server: ScriptedServer, **options: Any) -> VllmEngine:
    given: dict[str, Any] = {"vocabulary": VOCABULARY, "max_model_length": LENGTH, "detokenize": detokenize}
    given |= {"health_every_s": 0.002, **options}
    return VllmEngine(server, lambda: ServerClient(server.url), ServerOptions(**given))


def new_sync(engine: VllmEngine, model: ToyModel, canary: bool = True) -> WeightSync:
    source = ModelWeights(model)
    sender = ServerSender(FileTransfer(), source)
    sender.bind(engine.endpoints)

    async def score(rows: Any) -> list[list[float]]:
        tables = [row_table(model.arrays(), row) for row in rows]
        return [[float(t[i, k]) for i, k in enumerate(row[1:])] for row, t in zip(rows, tables, strict=True)]

    rows = Canary(canary_rows(VOCABULARY), score, 1e-3) if canary else None
    return WeightSync(source, sender, engine, rows, pauses=True)


class TestScriptedVllm(EngineContract):
    vocabulary = VOCABULARY
    draws = 300
    pins = False
    model_logprobs = False
    others = 15

    @pytest.fixture(autouse=True)
    def on_a_toy(self) -> None:
        self.model = ToyModel()
        self.servers: list[ScriptedServer] = []

    def make_engine(self, **options: Any) -> VllmEngine:
        recompute = options.pop("cache_on_publish", "keep") == "recompute"
        options.pop("prefill_tokens", None)
        max_batch = options.pop("max_batch", 64)
        self.servers.append(ScriptedServer(self.model, max_batch=max_batch))
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
    server = ScriptedServer(model)
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
    engine = new_engine(ScriptedServer(model))
    sync = new_sync(engine, model)
    for version in (1, 2, 3):
        model.move(version)
        assert (await soon(sync.sync(version))).version == version
        assert sync.canary_difference is not None and sync.canary_difference < 1e-6
    await engine.close()


async def test_a_logprob_that_is_no_number_fails_its_request_alone() -> None:
    server = ScriptedServer(ToyModel())
    engine = new_engine(server)
    await soon(engine.generate([3], SamplingParams(max_tokens=2), 1))
    server.running.fault = "non_finite"
    with pytest.raises(DataError, match="log-probability -9999"):
        await soon(engine.generate([3], SamplingParams(max_tokens=2), 1))
    server.running.fault = ""
    assert len((await soon(engine.generate([3], SamplingParams(max_tokens=2), 1))).completion_ids) == 2
    await engine.close()


# ---- lost servers ----------------------------------------------------------------------------------------------------


async def test_a_server_that_dies_comes_back_with_the_current_weights_and_answers_what_was_asked() -> None:
    model = ToyModel()
    server = ScriptedServer(model, lives=3)
    engine = new_engine(server)
    sync = new_sync(engine, model)
    model.move(1)
    await soon(sync.sync(1))
    params = SamplingParams(max_tokens=120)
    alone = [await soon(engine.generate([3, 4], params, seed)) for seed in range(4)]
    tasks = [asyncio.ensure_future(engine.generate([3, 4], params, seed)) for seed in range(4)]
    await under_way(engine, 20)
    await engine.resume()
    await server.running.die()
    for made, expected in zip(await soon(asyncio.gather(*tasks)), alone, strict=True):
        assert made.completion_ids == expected.completion_ids and set(made.versions) == {1}
    health = engine.health()
    assert (health.restarts, health.state, server.incarnation) == (1, "serving", 1)
    await engine.close()


async def test_a_server_that_dies_during_a_sync_gets_the_weights_in_its_next_life() -> None:
    model = ToyModel()
    server = ScriptedServer(model, lives=2)
    engine = new_engine(server)
    sync = new_sync(engine, model)
    await soon(sync.sync(1))
    task = asyncio.ensure_future(engine.generate([3, 4], SamplingParams(max_tokens=100), 1))
    await until(lambda: engine.health().generated_tokens > 5)
    model.move(2)
    server.running.fault = "dies"
    assert (await soon(sync.sync(2))).version == 2
    assert set((await soon(task)).versions) == {2}
    assert engine.health().restarts == 1 and not engine.health().paused
    await engine.close()


async def test_a_server_that_keeps_dying_ends_the_engine_with_the_reason() -> None:
    server = ScriptedServer(ToyModel(), lives=1)
    engine = new_engine(server)
    task = asyncio.ensure_future(engine.generate([3, 4], SamplingParams(max_tokens=200), 1))
    await until(lambda: engine.health().generated_tokens > 5)
    await server.running.die()
    with pytest.raises(EngineError, match=SMOKE):
        await soon(task)
    await engine.close()


async def test_a_replica_of_a_pool_does_not_wait_for_its_server() -> None:
    server = ScriptedServer(ToyModel(), lives=2)
    engine = new_engine(server, waits=False)
    task = asyncio.ensure_future(engine.generate([3, 4], SamplingParams(max_tokens=200), 1))
    await until(lambda: engine.health().generated_tokens > 5)
    await server.running.die()
    with pytest.raises(ServerLostError):
        await soon(task)
    await until(lambda: engine.health().state == "serving")
    await engine.close()


# ---- memory ----------------------------------------------------------------------------------------------------------


async def test_a_colocated_server_sleeps_while_the_learner_works() -> None:
    model = ToyModel()
    server = ScriptedServer(model)
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
    server = ScriptedServer(ToyModel())
    await server.start()
    server.running.routes_missing = {"/start_weight_update"}
    engine = new_engine(server)
    server.start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"has no /start_weight_update; start it with VLLM_SERVER_DEV_MODE=1"):
        await soon(engine.generate([3], SamplingParams(), 1))
    await engine.close()


async def test_raw_logprobs_are_refused() -> None:
    server = ScriptedServer(ToyModel())
    await server.start()
    server.running.raw_logprobs = True
    engine = new_engine(server)
    server.start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        await soon(engine.generate([3], SamplingParams(), 1))
    await engine.close()
