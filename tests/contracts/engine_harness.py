"""What the suites for rollout engines stand on: what an engine's test class supplies, and what tests ask for."""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from headrace.engines.base import Generation, RolloutEngine, SamplingParams
from headrace.weights.sync import WeightSync

T = TypeVar("T")
Start = Callable[..., RolloutEngine]
_HANG_S = 240.0  # far above what a test takes on a crowded machine, below where the run of the tests is ended


async def soon(awaitable: Awaitable[T]) -> T:
    """The result; a hang is a failure."""
    return await asyncio.wait_for(awaitable, _HANG_S)


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():  # noqa: ASYNC110  # an engine's health can only be asked for
            await asyncio.sleep(0.0005)

    await asyncio.wait_for(poll(), _HANG_S)


async def under_way(engine: RolloutEngine, tokens: int, each: bool = False) -> None:
    """Return with the engine paused after at least `tokens` more tokens; `each`: some of every replica that has any."""
    before = engine.health()

    def made() -> bool:
        now = engine.health()
        idle = each and any(
            new.running + new.waiting and new.generated_tokens == old.generated_tokens
            for new, old in zip(now.replicas, before.replicas, strict=True)
        )
        return now.generated_tokens >= before.generated_tokens + tokens and not idle

    await until(made)
    await soon(engine.pause())
    assert engine.health().running, "everything had finished before the engine was paused"


async def submitted(engine: RolloutEngine, requests: int) -> None:
    """Return once the engine knows of so many requests."""
    await until(lambda: engine.health().running + engine.health().waiting >= requests)


def sampling_logprobs(model_logprobs_TV: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """By definition: scale, keep the k likeliest, of those the smallest set with mass top_p, renormalise."""
    rows = []
    for row in model_logprobs_TV / temperature:
        probabilities = np.exp(row - row.max())
        order = np.argsort(-probabilities, kind="stable")
        order = order[: top_k or len(order)]
        before = np.cumsum(probabilities[order]) - probabilities[order]
        order = order[before < top_p * probabilities[order].sum()]
        kept = np.full(len(row), -np.inf)
        kept[order] = np.log(probabilities[order] / probabilities[order].sum())
        rows.append(kept)
    return np.array(rows)


def assert_fits(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square test, rare tokens pooled; a false alarm is a matter of one in ten thousand."""
    assert not counts[probabilities == 0].any(), "a token of probability zero was sampled"
    expected = counts.sum() * probabilities
    usual = expected >= 5
    observed = np.append(counts[usual], counts[~usual].sum())
    expected = np.append(expected[usual], expected[~usual].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4, f"chi-square {statistic:.1f} at {freedom} degrees"


class EngineHarness:
    """What a subclass supplies for its engine, and helpers for the tests."""

    vocabulary: int
    tolerance = 1e-4
    """How far a log-probability may be from the reference's."""
    long_tolerance = 1e-4
    """The same, at most over a request of `long` tokens."""
    crowd_tolerance = 3e-5
    """How far a log-probability may move with what else is in the batch; tokens may not at all. 1.0e-5 was seen."""
    long = 200
    """Tokens of a request that is still under way when something happens to it."""
    draws = 1500
    """Tokens drawn to see whether they follow the distribution."""
    others = 30
    """Requests in a crowd."""
    pins = True
    """Whether it can keep one version for pinned requests while it serves newer ones."""
    model_logprobs = True
    """Whether log-probabilities at temperature 1 come with those of any sampling distribution."""

    @abstractmethod
    def make_engine(self, **options: Any) -> RolloutEngine:
        """An engine on the policy of this test.

        Options: eos_ids, max_batch, max_model_length, prefill_tokens, defaults, cache_on_publish.
        """

    @abstractmethod
    def reference_logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """[T, V]: the log-probability, at temperature 1, of each token of the vocabulary after each of the ids."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text that the engine searches for stop strings."""

    @abstractmethod
    def change_weights(self) -> None:
        """Move the policy, the reference with it. The engine is paused."""

    @abstractmethod
    def new_sync(self, engine: Any) -> WeightSync:
        """What brings the policy's weights to an engine that `make_engine` made."""

    async def sync(self, engine: RolloutEngine, version: int) -> str:
        """Sync the policy's weights as they are now; their digest."""
        if id(engine) not in self._syncs:
            self._syncs[id(engine)] = self.new_sync(engine)
        return (await soon(self._syncs[id(engine)].sync(version))).digest

    @property
    def _syncs(self) -> dict[int, WeightSync]:
        return self.__dict__.setdefault("syncs", {})

    @abstractmethod
    def digest(self) -> str:
        """Of the policy's weights, as the backend takes it."""

    @abstractmethod
    def break_model(self) -> str:
        """Make every further forward of the engine's model fail; returns words of the failure."""

    @pytest.fixture
    async def start(self) -> AsyncIterator[Start]:
        """`make_engine`, with a close at the end of the test."""
        engines: list[RolloutEngine] = []

        def start(**options: Any) -> RolloutEngine:
            engines.append(self.make_engine(**options))
            return engines[-1]

        yield start
        for engine in engines:
            await soon(engine.close())

    def need_pins(self) -> None:
        if not self.pins:
            pytest.skip("this engine has one version at a time")

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(f"{seed}/{length}")
        return [rng.randrange(3, self.vocabulary) for _ in range(length)]

    async def crowd(self, engine: RolloutEngine, count: int, max_tokens: int = 24, seed: int = 100) -> list[Generation]:
        """Requests of many lengths at once."""
        rng = random.Random(seed)
        return await soon(
            asyncio.gather(
                *(
                    engine.generate(
                        self.prompt(rng.randint(1, 20), i),
                        SamplingParams(max_tokens=rng.randint(1, max_tokens)),
                        seed + i,
                    )
                    for i in range(count)
                )
            )
        )

    def expected(self, generation: Generation) -> np.ndarray:
        """[completion, V]: the reference's log-probabilities where the completion was sampled."""
        row = [*generation.prompt_ids, *generation.completion_ids]
        return self.reference_logprobs(row[:-1])[len(generation.prompt_ids) - 1 :]

    def assert_logprobs(
        self, generation: Generation, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
    ) -> None:
        model_TV = self.expected(generation)
        chosen = np.array(generation.completion_ids)[:, None]
        sampling_TV = sampling_logprobs(model_TV, temperature, top_k, top_p)
        plain = temperature == 1.0 and not top_k and top_p == 1.0
        both = ((generation.logprobs, sampling_TV), (generation.model_logprobs, model_TV))
        for got, table in both if self.model_logprobs or plain else both[:1]:
            np.testing.assert_allclose(got, np.take_along_axis(table, chosen, 1)[:, 0], atol=self.tolerance, rtol=0)

    def assert_same(self, one: Generation, two: Generation, tokens: int | None = None) -> None:
        """The same tokens, and the same log-probabilities as far as the batch may move them."""
        assert one.completion_ids[:tokens] == two.completion_ids[:tokens]
        for name in ("logprobs", "model_logprobs"):
            first, second = getattr(one, name)[:tokens], getattr(two, name)[:tokens]
            np.testing.assert_allclose(first, second, atol=self.crowd_tolerance, rtol=0)
