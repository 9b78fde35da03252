"""The Tinker engine passes the engine contract through a real server; replies are asked for in short segments."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_equality import tinker_server

import tiny
from contracts.backend_contract import IMITATE, random_samples
from contracts.engine_contract import EngineContract
from contracts.engine_harness import Start, soon
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.setup import attach_engine, choose
from headrace.backends.tinker.backend import TinkerBackend
from headrace.backends.tinker.engine import TinkerEngine
from headrace.backends.tinker.rows import returned_logprobs, wide_datum
from headrace.backends.tinker.sender import TinkerPath
from headrace.backends.tinker.service import blocking
from headrace.config.loading import build_config
from headrace.data.sample import Sample
from headrace.engines.base import SamplingParams
from headrace.errors import EngineError
from headrace.weights.sync import WeightSync


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    os.environ["TINKER_TELEMETRY"] = "0"
    with tinker_server(tmp_path_factory.mktemp("tinker"), str(model)) as address:
        os.environ["TINKER_BASE_URL"] = address
        yield address
        del os.environ["TINKER_BASE_URL"]


@pytest.mark.slow  # a minute; what follows it is the quick part
class TestSegments(EngineContract):
    vocabulary = tiny.VOCABULARY
    long = 100
    draws = 120
    others = 6
    segment = 4

    @pytest.fixture(autouse=True)
    def policy(self, model: Path) -> Iterator[None]:
        self.backend = TinkerBackend(
            build_config({"backend": {"name": "tinker"}, "model": {"name": str(model)}, "tinker": {"rank": 4}})
        )
        yield
        blocking(lambda: asyncio.run(self.backend.close()))

    def make_engine(self, **options: Any) -> TinkerEngine:
        for name in ("prefill_tokens", "cache_on_publish"):  # of engines that have a cache
            options.pop(name, None)
        options.setdefault("max_model_length", tiny.LENGTH - 1)
        return TinkerEngine(
            TinkerPath(self.backend._serve),
            vocabulary=self.vocabulary,
            detokenize=tiny.detokenize,
            segment_tokens=self.segment,
            **options,
        )

    def reference_logprobs(self, ids: Sequence[int]) -> np.ndarray:
        zeros = (0,) * len(ids)
        row = Sample((*ids, 0), zeros, zeros, zeros, zeros)
        data, training = [wide_datum(row, self.vocabulary)], self.backend._training
        output = blocking(lambda: training.forward(data, "cross_entropy").result())
        (logprobs,) = returned_logprobs(output, [(len(ids), self.vocabulary)])
        return logprobs.numpy()

    def detokenize(self, ids: Sequence[int]) -> str:
        return tiny.detokenize(ids)

    def change_weights(self) -> None:
        batch = pack(random_samples(6, self.vocabulary, seed=99), IMITATE, 512)

        async def train() -> None:
            for _ in range(3):
                await self.backend.forward_backward(batch, IMITATE)
                await self.backend.optim_step(0.05, grad_scale([batch], IMITATE))

        blocking(lambda: asyncio.run(train()))

    def new_sync(self, engine: TinkerEngine) -> WeightSync:
        return WeightSync(self.backend, engine._sender, engine)

    def digest(self) -> str:
        return self.backend._lineage

    def break_model(self) -> str:
        blocking(lambda: asyncio.run(self.backend.close()))
        return "Tinker: asample"

    async def test_a_kept_cache_still_remembers_the_old_weights(self, start: Start) -> None:
        pytest.skip("the service keeps no cache between two requests: check refuses to keep one")


async def test_complete_replies_end_under_the_weights_they_began_with(model: Path) -> None:
    config = build_config({"backend": {"name": "tinker"}, "model": {"name": str(model)}, "tinker": {"rank": 4}})
    backend = TinkerBackend(config)
    policy = attach_engine(config, backend, choose(config))
    engine = policy.engine
    await policy.sync.sync(1)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    tasks = [
        asyncio.ensure_future(engine.generate([rng.randrange(3, 90) for _ in range(5)], params, seed))
        for seed in range(4)
    ]
    await asyncio.sleep(0.02)
    await policy.sync.sync(2)
    for made in await soon(asyncio.gather(*tasks)):
        assert set(made.versions) == {1} and len(made.versions) == 150
    assert set((await soon(engine.generate([5], params, 1))).versions) == {2}
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([5], params, 1)
    await backend.close()
