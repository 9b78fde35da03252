"""Two real vLLM servers in a pool: one evaluates while the other goes on, and answers of an old life are refused."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_servers import new_server

import tiny
from headrace.backends.local.frozen import score_rows
from headrace.config import ModelSection
from headrace.engines.base import Generation, SamplingParams
from headrace.engines.pool import EnginePool
from headrace.engines.servers.client import ServerClient
from headrace.engines.servers.life import ServerOptions
from headrace.engines.servers.server import StartedServer
from headrace.engines.vllm.engine import VllmEngine
from headrace.models.causal import build_causal_model
from headrace.models.load import load_model
from headrace.weights.canary import Canary, canary_rows
from headrace.weights.sender import server_sender
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 12, 40]
LOST, FORGED = "an answer that the lost server still gave", 7


class SlowClient(ServerClient):
    """Keeps one answer back, as a slow network may, and delivers it as tokens that nobody sampled."""

    keep = False
    kept = asyncio.Event()
    delivered = asyncio.Event()

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        if not (path.endswith("/generate") and SlowClient.keep):
            return await super().post(path, body, timeout_s)
        SlowClient.keep = False
        answer = await super().post(path, {**body, "sampling_params": {**body["sampling_params"], "max_tokens": 3}})
        SlowClient.kept.set()
        await SlowClient.delivered.wait()
        answer["choices"][0]["token_ids"] = [FORGED] * len(answer["choices"][0]["token_ids"])
        return answer


class Two:
    """A learner, and a pool of two servers."""

    def __init__(self, folder: Path, logs: Path) -> None:
        torch.set_num_threads(1)
        self.hf_model = load_model(ModelSection(name=str(folder)))
        self.model = build_causal_model(self.hf_model)
        self.servers: list[StartedServer] = [new_server(folder, logs / f"{number}.log") for number in (0, 1)]
        options = ServerOptions(
            vocabulary=tiny.VOCABULARY, max_model_length=tiny.LENGTH - 1, detokenize=tiny.detokenize,
            health_every_s=0.05, waits=False,
        )  # fmt: skip
        engines = [VllmEngine(one, lambda one=one: SlowClient(one.url), options) for one in self.servers]
        self.pool = EnginePool(engines, pins_one=True)
        source = ModelWeights(self.hf_model)
        self.sender = server_sender("file", source)
        self.sender.bind(self.pool.endpoints)
        canary = Canary(canary_rows(tiny.VOCABULARY), self.score, 1e-3)
        self.sync = WeightSync(source, self.sender, self.pool, canary, pauses=True)

    async def score(self, rows: Any) -> list[list[float]]:
        return score_rows(self.model, rows, [1.0] * len(rows), [range(len(rows))], 256)

    @torch.no_grad()
    def move(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.hf_model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator) * (parameter.std() + 0.05)

    async def far_off(self, made: Generation) -> float:
        """The largest difference between sampler and learner."""
        (scores,) = await self.score([[*made.prompt_ids, *made.completion_ids]])
        return float(np.abs(np.array(scores[len(made.prompt_ids) - 1 :]) - np.array(made.logprobs)).max())

    def asked(self, tokens: int, seed: int, pinned: bool = False) -> asyncio.Future[Generation]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return asyncio.ensure_future(self.pool.generate(PROMPT, params, seed, pinned))


@asynccontextmanager
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    folder = tiny.saved_model("llama_ungrouped_tied", tmp_path, hidden_size=128)
    pair = Two(folder, tmp_path)
    try:
        yield pair
    finally:
        await pair.pool.close()
        pair.sender.close()


async def test_an_evaluation_has_one_server_for_itself_while_the_other_gets_newer_weights(tmp_path: Path) -> None:
    async with two(tmp_path) as pair:
        await pair.sync.sync(1)
        assert await pair.pool.pin() == 1
        long = [pair.asked(200, seed, pinned=True) for seed in range(4)]
        for version in (2, 3):
            pair.move(version)
            await pair.sync.sync(version)
            made = await asyncio.gather(*(pair.asked(20, seed) for seed in range(8)))
            assert {v for one in made for v in one.versions} == {version}
            assert max([await pair.far_off(one) for one in made]) <= 1e-4
        evaluated = [*await asyncio.gather(*long), await pair.asked(20, 9, pinned=True)]
        assert {v for one in evaluated for v in one.versions} == {1}
        assert await pair.far_off(evaluated[-1]) > 1e-2  # of the old weights, which the learner no longer has
        await pair.pool.unpin()
        both = await asyncio.gather(*(pair.asked(20, seed) for seed in range(16)))
        assert {v for one in both for v in one.versions} == {3}
        assert max([await pair.far_off(one) for one in both]) <= 1e-4
        assert [one.version for one in pair.pool.health().replicas] == [3, 3]


async def test_an_answer_of_a_server_that_was_lost_since_is_refused(tmp_path: Path) -> None:
    async with two(tmp_path) as pair:
        pair.move(4)
        await pair.sync.sync(1)
        SlowClient.keep = True
        late = pair.asked(40, 1)
        await SlowClient.kept.wait()
        number = next(one.number for one in pair.pool.replicas if one.in_flight)
        child = pair.servers[number].child
        assert child is not None
        os.kill(child.descendants()[0], signal.SIGKILL)
        async with asyncio.timeout(300):
            while pair.pool.health().restarts == 0 or not all(one.serves for one in pair.pool.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        SlowClient.delivered.set()
        made = await late
        assert len(made.completion_ids) == 40 and set(made.completion_ids) != {FORGED}, LOST
        assert await pair.far_off(made) <= 1e-4 and set(made.versions) == {1}
        assert pair.pool.health().reissued >= 1
