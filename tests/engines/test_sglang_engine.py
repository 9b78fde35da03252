"""The SGLang engine against a scripted server: the engine contract, faults of a sync, what is checked at the start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_servers import SglangServer as Server
from scripted_servers import new_engine, new_sync
from scripted_vllm import ToyModel
from test_vllm_scripted import TestScriptedVllm as _Scripted

from contracts.engine_harness import Start, soon, under_way
from headrace.config.loading import build_config
from headrace.engines.base import SamplingParams
from headrace.engines.servers.life import ServerOptions
from headrace.engines.sglang.build import SglangLaunch
from headrace.engines.sglang.factory import sglang_engine
from headrace.errors import ConfigError, WeightSyncError
from headrace.registry import resolve


class TestScriptedSglang(_Scripted):
    def make_engine(self, **options: Any) -> Any:
        options.pop("cache_on_publish", None)
        options.pop("prefill_tokens", None)
        max_batch = options.pop("max_batch", 64)
        self.servers.append(Server(self.model, max_batch=max_batch))
        options["eos_ids"] = tuple(options.get("eos_ids", ()))
        return new_engine(self.servers[-1], max_batch=max_batch, **options)

    async def test_a_kept_cache_still_remembers_the_old_weights(self, start: Start) -> None:
        pytest.skip("every leg is computed with the weights that decode it")

    async def test_a_reply_in_legs_has_the_version_of_each(self, start: Start) -> None:
        engine = start()
        task = self.asked(engine, self.long)
        for version in (1, 2):
            await under_way(engine, 10)
            self.change_weights()
            await self.sync(engine, version)
            await engine.resume()
        made = await soon(task)
        assert set(made.versions) == {0, 1, 2} and list(made.versions) == sorted(made.versions)


del _Scripted


# ---- proofs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nothing", "still decodes with the weights of version 1: the sync changed nothing"),
        ("stale_head", "some tensors are missing, changed, or kept in a stale copy"),
        ("refuses", "no such folder"),
    ],
)
async def test_a_sync_that_went_wrong_says_how(fault: str, says: str) -> None:
    model = ToyModel()
    server = Server(model)
    engine = new_engine(server)
    sync = new_sync(engine, model)
    await sync.sync(1)
    server.running.fault = fault
    model.move(3)
    with pytest.raises(WeightSyncError, match=says):
        await soon(sync.sync(2))
    await engine.close()


async def test_memory_goes_back_while_the_learner_works() -> None:
    model = ToyModel()
    server = Server(model)
    engine = new_engine(server, sleeps=True)
    sync = new_sync(engine, model)
    await sync.sync(1)
    await engine.pause()
    await engine.release_cache()
    model.move(3)
    await sync.sync(2)
    await engine.resume()
    made = await soon(engine.generate([5, 6], SamplingParams(max_tokens=4), 1))
    assert set(made.versions) == {2}
    calls = [path for path in server.running.calls if "memory" in path or "update_weights" in path]
    assert calls[-3:] == ["/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"]
    await engine.close()


async def test_every_token_has_the_experts_of_the_leg_that_sampled_it() -> None:
    model = ToyModel()
    server = Server(model)
    engine = new_engine(server, routed_experts=True)
    sync = new_sync(engine, model)
    server.returns_experts = True
    await sync.sync(1)
    task = asyncio.ensure_future(engine.generate([5, 6], SamplingParams(max_tokens=200), 1))
    await under_way(engine, 10)
    await sync.sync(2)
    await engine.resume()
    made = await soon(task)
    assert made.routed_experts is not None and len(made.routed_experts) == 201
    before = made.versions.count(1)
    assert 0 < before < 200
    # the last token of the first leg was first read by the second
    expected = [10 + at % 8 for at in range(before + 1)] + [20 + at % 8 for at in range(before + 1, 201)]
    assert made.routed_experts.array()[:, 0].tolist() == expected
    await engine.close()


# ---- what is checked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda server: setattr(server, "server_version", "0.4.1"), r"runs SGLang 0\.4\.1, and Headrace needs 0\.5"),
        (lambda server: server.routes_missing.add("/pause_generation"), "has no /pause_generation"),
        (lambda server: server.info.pop("enable_metrics"), "start it with --enable-metrics"),
        (lambda server: setattr(server, "raw_logprobs", True), "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
)
async def test_a_server_that_cannot_do_it_is_refused_with_the_remedy(break_it: Any, says: str) -> None:
    class Broken(Server):
        async def start(self) -> None:
            await super().start()
            break_it(self.running)

    engine = new_engine(Broken(ToyModel()))
    with pytest.raises(ConfigError, match=says):
        await soon(engine.generate([5], SamplingParams(max_tokens=2), 1))
    await engine.close()


async def test_a_server_that_returns_no_experts_is_refused_if_they_are_replayed() -> None:
    engine = new_engine(Server(ToyModel()), routed_experts=True)
    with pytest.raises(ConfigError, match="start it with --enable-return-routed-experts"):
        await soon(engine.generate([5], SamplingParams(max_tokens=2), 1))
    await engine.close()


def test_settings_that_it_cannot_honour_are_refused() -> None:
    assert resolve("engine", "sglang") is sglang_engine
    assert sglang_engine.abilities(build_config({"engine": {"name": "sglang", "replicas": 2}})).pins
    for values, says in (
        ({"engine": {"name": "sglang", "transport": "gloo"}}, "nccl or disk"),
        ({"engine": {"name": "sglang"}, "model": {"lora": {"rank": 4}}}, 'engine.name = "vllm"'),
    ):
        with pytest.raises(ConfigError, match=says):
            sglang_engine.abilities(build_config(values))


def test_a_server_is_started_with_what_a_run_needs() -> None:
    config = build_config({"engine": {"name": "sglang", "server_args": ["--tp", "2", "--dtype", "bfloat16"]}})
    command = SglangLaunch(config, ServerOptions(97, 255, sleeps=True)).command(4000)
    said = " ".join(command)
    assert "-m sglang.launch_server" in said and "--port 4000" in said and "--enable-metrics" in said
    assert said.endswith("--tp 2 --dtype bfloat16") and said.count("--dtype") == 1 and "--enable-memory-saver" in said
