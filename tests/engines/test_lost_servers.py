"""Servers of both kinds that die, hang, or were left in the middle of something. They are scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripted_servers import SMOKE, SglangServer, VllmServer, given_server, new_engine, new_sync
from scripted_vllm import ScriptedVllm, ToyModel

from contracts.engine_harness import soon, under_way, until
from headrace.engines.base import SamplingParams
from headrace.engines.pool import EnginePool
from headrace.engines.servers.client import ServerClient
from headrace.errors import ConfigError, EngineError, ServerLostError, WeightSyncError
from headrace.weights.sender import ServerSender
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync
from headrace.weights.transfers.adapter import AdapterTransfer

Kind = type[VllmServer]
LEFT: dict[str, tuple[tuple[str, Any], ...]] = {
    "file": (("/pause?mode=keep&clear_cache=false", None), ("/start_weight_update", None)),
    "disk": (("/pause_generation", {"mode": "abort"}),),
}
"""What a run that is killed in a sync has asked for by then, by the kind of server."""


@pytest.fixture(params=[VllmServer, SglangServer], ids=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


async def test_a_server_that_dies_comes_back_with_the_current_weights_and_answers_what_was_asked(kind: Kind) -> None:
    model = ToyModel()
    server = kind(model, lives=3)
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


async def test_a_server_that_dies_during_a_sync_gets_the_weights_in_its_next_life(kind: Kind) -> None:
    model = ToyModel()
    server = kind(model, lives=2)
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


async def test_a_server_that_keeps_dying_ends_the_engine_with_the_reason(kind: Kind) -> None:
    server = kind(ToyModel(), lives=1)
    engine = new_engine(server)
    task = asyncio.ensure_future(engine.generate([3, 4], SamplingParams(max_tokens=200), 1))
    await until(lambda: engine.health().generated_tokens > 5)
    await server.running.die()
    with pytest.raises(EngineError, match=SMOKE):
        await soon(task)
    await engine.close()


async def test_a_replica_of_a_pool_does_not_wait_for_its_server(kind: Kind) -> None:
    server = kind(ToyModel(), lives=2)
    engine = new_engine(server, waits=False)
    task = asyncio.ensure_future(engine.generate([3, 4], SamplingParams(max_tokens=200), 1))
    await until(lambda: engine.health().generated_tokens > 5)
    await server.running.die()
    with pytest.raises(ServerLostError):
        await soon(task)
    await until(lambda: engine.health().state == "serving")
    await engine.close()


@pytest.mark.parametrize("fault", ["silent", "stuck"])
async def test_a_server_that_hangs_is_replaced_and_what_was_asked_is_asked_again(kind: Kind, fault: str) -> None:
    model = ToyModel()
    server = kind(model, lives=2)
    engine = new_engine(server, hang_s=0.3)
    sync = new_sync(engine, model)
    model.move(1)
    await soon(sync.sync(1))
    params = SamplingParams(max_tokens=120)
    alone = await soon(engine.generate([3, 4], params, 7))
    task = asyncio.ensure_future(engine.generate([3, 4], params, 7))
    await until(lambda: server.running.busy)
    server.running.fault = fault  # it takes calls, and never answers: all of them, or those that need its engine core
    assert (await soon(task)).completion_ids == alone.completion_ids
    assert (engine.health().restarts, server.incarnation, engine.health().state) == (1, 1, "serving")
    await engine.close()


@pytest.mark.parametrize("fault", ["silent", "stuck", "headless"])
async def test_a_server_that_hangs_in_a_sync_gets_the_weights_in_its_next_life(kind: Kind, fault: str) -> None:
    model = ToyModel()
    server = kind(model, lives=2)
    engine = new_engine(server, hang_s=0.3)
    sync = new_sync(engine, model)
    await soon(sync.sync(1))
    server.running.fault = fault
    model.move(2)
    assert (await soon(sync.sync(2))).version == 2
    assert set((await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))).versions) == {2}
    assert engine.health().restarts == 1
    await engine.close()


async def test_a_replica_that_hangs_is_lost_to_its_pool_which_asks_another(kind: Kind) -> None:
    model = ToyModel()
    servers = [kind(model, lives=2) for _ in range(2)]
    engines = [new_engine(server, waits=False, hang_s=0.3) for server in servers]
    pool = EnginePool(engines, pins_one=True)
    sync = new_sync(pool, model)
    await soon(sync.sync(1))
    params = SamplingParams(max_tokens=60)
    tasks = [asyncio.ensure_future(pool.generate([5, n], params, n, affinity=f"g{n}")) for n in range(8)]
    await until(lambda: servers[0].running.busy)
    servers[0].running.fault = "stuck"
    assert all(len(made.completion_ids) == 60 for made in await soon(asyncio.gather(*tasks)))
    assert pool.health().reissued and engines[0].health().restarts == 1
    await until(lambda: engines[0].health().state == "serving")
    await pool.close()


async def test_a_server_of_somebody_elses_that_only_says_that_it_is_well_ends_the_engine(kind: Kind) -> None:
    scripted = await kind.new(ToyModel().arrays()).start()
    engine = new_engine(given_server(scripted), kind, hang_s=0.1)
    await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))
    scripted.fault = "stuck"
    with pytest.raises(EngineError, match="was lost 4 times in a row without serving a request"):
        await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))
    await engine.close()
    await scripted.die()


async def test_a_server_that_hangs_at_its_first_request_is_replaced(kind: Kind) -> None:
    class Late(kind):
        async def start(self) -> None:
            await super().start()
            self.running.fault = "" if self.incarnation else "stuck"

    model = ToyModel()
    server = Late(model, lives=2)
    engine = new_engine(server, hang_s=0.2)
    assert (await soon(new_sync(engine, model).sync(1))).version == 1
    assert server.incarnation == 1
    await engine.close()


async def test_a_server_that_a_killed_run_left_in_the_middle_of_a_sync_serves_the_next_run(kind: Kind) -> None:
    model = ToyModel()
    scripted = await kind.new(model.arrays()).start()
    client = ServerClient(scripted.url)
    for path, body in LEFT[kind.transport]:
        await client.post(path, body)
    engine = new_engine(given_server(scripted), kind)
    sync = new_sync(engine, model)
    model.move(1)
    await soon(sync.sync(1))
    assert set((await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))).versions) == {1}
    await engine.close()
    await client.close()
    await scripted.die()


async def test_a_server_that_decodes_slowly_is_left_alone(kind: Kind) -> None:
    server = kind(ToyModel(), lives=1)
    engine = new_engine(server, hang_s=0.2)
    made = await soon(engine.generate([3, 4], SamplingParams(max_tokens=200), 1))  # longer than that in all
    await engine.pause()
    waiting = asyncio.ensure_future(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))
    await asyncio.sleep(0.5)  # nor does it have to decode while it is paused
    await engine.resume()
    assert len(made.completion_ids) == 200 and len((await soon(waiting)).completion_ids) == 5
    assert engine.health().restarts == 0
    await engine.close()


async def test_a_server_that_dies_before_it_gives_memory_back_is_started_again(kind: Kind) -> None:
    model = ToyModel()
    server = kind(model, lives=2)
    engine = new_engine(server, sleeps=True)
    sync = new_sync(engine, model)
    await soon(sync.sync(1))
    await soon(engine.pause())
    await server.running.die()
    await soon(engine.release_cache())
    await until(lambda: engine.health().restarts == 1 and engine.health().state == "serving")
    await soon(sync.resume())  # it is still to be proved
    assert len((await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))).completion_ids) == 5
    await engine.close()


@pytest.mark.parametrize("call", ["pause", "resume", "begin_update", "restart"])
async def test_no_call_waits_for_a_server_that_could_not_be_started_again(kind: Kind, call: str) -> None:
    gives_up = asyncio.Event()

    class Server(kind):
        async def replace(self) -> None:
            await gives_up.wait()
            await super().replace()

    model = ToyModel()
    server = Server(model, lives=1)
    engine = new_engine(server)
    await soon(new_sync(engine, model).sync(1))
    await server.running.die()
    await until(lambda: engine.health().state == "starting")
    given = (2,) if call == "begin_update" else ()
    waiting = asyncio.ensure_future(getattr(engine, call)(*given))
    await asyncio.sleep(0.05)
    gives_up.set()
    with pytest.raises(EngineError, match=SMOKE):
        await asyncio.wait_for(waiting, 20)
    await engine.close()


@pytest.mark.parametrize("state", ["unsynced", "serving"])
async def test_an_engine_that_is_resumed_while_its_server_is_restored_decodes_after_the_proof(
    kind: Kind, state: str
) -> None:
    model = ToyModel()
    server = kind(model, lives=2)
    engine = new_engine(server)
    sync = new_sync(engine, model)
    model.move(1)
    await soon(sync.sync(1))
    await soon(engine.pause())
    await server.running.die()
    await until(lambda: engine.health().restarts == 1 and engine.health().state == state)
    await soon(sync.resume())
    made = await asyncio.wait_for(engine.generate([3, 4], SamplingParams(max_tokens=5), 1), 60)
    assert set(made.versions) == {1} and engine.health().error is None
    await engine.close()


async def test_a_server_that_dies_between_a_sync_and_its_proof_gets_the_weights_once_more(kind: Kind) -> None:
    model = ToyModel()
    server = kind(model, lives=2)
    engine = new_engine(server)
    sync = new_sync(engine, model)
    await soon(sync.sync(1))
    end_update = engine.end_update

    async def dies_then(version: int) -> None:
        await end_update(version)
        if not server.incarnation:
            await server.running.die()
            await until(lambda: engine.health().state == "unsynced")

    engine.end_update = dies_then
    model.move(2)
    assert (await soon(sync.sync(2))).version == 2
    assert set((await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))).versions) == {2}
    await engine.close()


async def test_a_pool_of_two_servers_survives_the_death_of_one(kind: Kind) -> None:
    model = ToyModel()
    servers = [kind(model, lives=2) for _ in range(2)]
    engines = [new_engine(server, waits=False) for server in servers]
    pool = EnginePool(engines, pins_one=True)
    sync = new_sync(pool, model)
    await soon(sync.sync(1))
    tasks = [soon(pool.generate([5, n], SamplingParams(max_tokens=60), n, affinity=f"g{n}")) for n in range(8)]
    running = asyncio.gather(*tasks)
    await asyncio.sleep(0.01)
    await servers[0].running.die()
    model.move(3)
    await soon(sync.sync(2))
    found = await running
    assert all(len(made.completion_ids) == 60 for made in found)
    while engines[0].health().state != "serving":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert {engine.health().version for engine in engines} == {2} and pool.health().reissued
    await pool.close()


async def test_a_replica_at_which_a_transfer_fails_is_replaced_and_the_others_are_synced(kind: Kind) -> None:
    model = ToyModel()
    servers = [kind(model, lives=2) for _ in range(2)]
    engines = [new_engine(server) for server in servers]
    pool = EnginePool(engines, pins_one=True)
    sync = new_sync(pool, model)
    await soon(sync.sync(1))
    servers[1].running.fault = "drops" if kind is VllmServer else "refuses"
    model.move(4)
    await soon(sync.sync(2))
    assert set((await soon(pool.generate([3], SamplingParams(max_tokens=10), 1))).versions) == {2}
    await until(lambda: engines[1].health().state == "serving" and engines[1].health().version == 2)
    assert [engine.health().restarts for engine in engines] == [0, 1]
    for server in servers:  # at all of them: no replica is at fault
        server.running.fault = "drops" if kind is VllmServer else "refuses"
    model.move(5)
    with pytest.raises(WeightSyncError):
        await soon(sync.sync(3))
    await pool.close()


async def test_a_replica_that_is_lost_while_it_evaluates_comes_back(kind: Kind) -> None:
    model = ToyModel()
    servers = [kind(model, lives=2) for _ in range(2)]
    engines = [new_engine(server, waits=False) for server in servers]
    pool = EnginePool(engines, pins_one=True)
    sync = new_sync(pool, model)
    model.move(1)
    await soon(sync.sync(1))
    assert await soon(pool.pin()) == 1
    number = next(n for n, engine in enumerate(engines) if engine.health().pinned == 1)
    await servers[number].running.die()
    await until(lambda: engines[number].health().restarts == 1)
    params = SamplingParams(max_tokens=5)
    assert set((await soon(pool.generate([3, 4], params, 1, pinned=True))).versions) == {1}
    await until(lambda: engines[number].health().state == "serving")
    assert engines[number].health().error is None
    model.move(2)
    await soon(sync.sync(2))
    assert set((await soon(pool.generate([3, 4], params, 1, pinned=True))).versions) == {1}
    await soon(pool.unpin())
    assert {engine.health().version for engine in engines} == {2}
    await pool.close()


async def test_pinned_adapters_that_a_lost_server_had_are_asked_of_another_that_has_them() -> None:
    class Loads(ScriptedVllm):
        def _on_v1_load_lora_adapter(self, body: Any, query: Any) -> Any:
            found = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
            self.adapters[body["lora_name"]] = {name: value.astype(np.float64) for name, value in found.items()}

        def _on_v1_unload_lora_adapter(self, body: Any, query: Any) -> Any:
            self.adapters.pop(body["lora_name"], None)

    class Server(VllmServer):
        new = Loads

    model = ToyModel()
    servers = [Server(model, lives=2) for _ in range(2)]
    engines = [new_engine(server, waits=False, transport="adapter") for server in servers]
    pool, source = EnginePool(engines), ModelWeights(model)
    sender = ServerSender(AdapterTransfer({}), source)
    sender.bind(pool.endpoints)
    sync = WeightSync(source, sender, pool, pauses=True)
    await soon(sync.sync(1))
    await soon(pool.pin())
    model.move(2)
    await soon(sync.sync(2))
    await servers[0].running.die()
    await until(lambda: engines[0].health().restarts == 1 and engines[0].health().state == "serving")
    params = SamplingParams(max_tokens=5)
    tasks = [pool.generate([5, n], params, n, pinned=True, affinity=f"g{n}") for n in range(8)]
    assert {version for made in await soon(asyncio.gather(*tasks)) for version in made.versions} == {1}
    await soon(pool.unpin())
    assert await soon(pool.pin()) == 2
    await pool.close()
    sender.close()


async def test_a_server_that_reads_less_than_the_engine_asks_of_it_is_refused(kind: Kind) -> None:
    engine = new_engine(kind(ToyModel(), length=100))
    with pytest.raises(ConfigError, match=r"reads at most 100 tokens, .* comes to 255; set it to 99, or start .* 256"):
        await soon(engine.generate([3, 4], SamplingParams(max_tokens=5), 1))
    await engine.close()
