"""What every rollout engine must do. Subclass `EngineContract`, supply what is abstract, and pass all of it.

Only the `RolloutEngine` protocol is used, so that an engine in another process or behind HTTP can be held to it.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from headrace.engine.base import Generation, RolloutEngine, SamplingParams
from headrace.errors import EngineError

T = TypeVar("T")
Start = Callable[..., RolloutEngine]


async def soon(awaitable: Awaitable[T]) -> T:
    """The result; a hang is a failure."""
    return await asyncio.wait_for(awaitable, 60)


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():  # noqa: ASYNC110  # an engine's health can only be asked for
            await asyncio.sleep(0.0005)

    await asyncio.wait_for(poll(), 20)


async def under_way(engine: RolloutEngine, tokens: int) -> None:
    """Return with the engine paused after at least `tokens` more tokens."""
    goal = engine.health().generated_tokens + tokens
    await until(lambda: engine.health().generated_tokens >= goal)
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


class EngineContract:
    """One suite for all engines."""

    vocabulary: int
    tolerance = 1e-4
    """How far a log-probability may be from the reference's."""
    crowd_tolerance = 1e-5
    """How far a log-probability may move with what else is in the batch; tokens may not at all."""
    long = 200
    """Tokens of a request that is still under way when something happens to it."""
    draws = 1500
    """Tokens drawn to see whether they follow the distribution."""
    others = 30
    """Requests in a crowd."""

    @abstractmethod
    def make_engine(self, **options: Any) -> RolloutEngine:
        """An engine on the policy of this test. Options: eos_ids, max_batch, max_model_length, defaults."""

    @abstractmethod
    def reference_logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """[T, V]: the log-probability, at temperature 1, of each token of the vocabulary after each of the ids."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text that the engine searches for stop strings."""

    @abstractmethod
    def change_weights(self) -> Any:
        """Move the policy, the reference with it, and return what `load_weights` is given. The engine is paused."""

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

    # ---- helpers --------------------------------------------------------------------------------------------------

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
        for got, table in ((generation.model_logprobs, model_TV), (generation.logprobs, sampling_TV)):
            np.testing.assert_allclose(got, np.take_along_axis(table, chosen, 1)[:, 0], atol=self.tolerance, rtol=0)

    def assert_same(self, one: Generation, two: Generation, tokens: int | None = None) -> None:
        """The same tokens, and the same log-probabilities as far as the batch may move them."""
        assert one.completion_ids[:tokens] == two.completion_ids[:tokens]
        for name in ("logprobs", "model_logprobs"):
            first, second = getattr(one, name)[:tokens], getattr(two, name)[:tokens]
            np.testing.assert_allclose(first, second, atol=self.crowd_tolerance, rtol=0)

    # ---- what comes back ------------------------------------------------------------------------------------------

    async def test_a_generation_has_one_entry_per_token(self, start: Start) -> None:
        prompt = self.prompt(5)
        made = await soon(start().generate(prompt, SamplingParams(max_tokens=9), 1))
        assert made.prompt_ids == tuple(prompt)
        assert len(made.completion_ids) == len(made.logprobs) == len(made.model_logprobs) == len(made.versions) == 9
        assert all(type(token) is int and 0 <= token < self.vocabulary for token in made.completion_ids)
        assert made.versions == (0,) * 9
        assert made.temperature == 1.0

    @pytest.mark.parametrize("length", [1, 2, 17])
    async def test_logprobs_are_those_of_the_model(self, start: Start, length: int) -> None:
        made = await soon(start().generate(self.prompt(length), SamplingParams(max_tokens=30), 3))
        self.assert_logprobs(made)
        assert made.logprobs == made.model_logprobs  # nothing is scaled or cut

    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p"),
        [(0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 20, 0.8), (1.0, 10_000, 1.0), (0.7, 1, 1.0)],
    )
    async def test_logprobs_are_those_of_the_sampling_distribution(
        self, start: Start, temperature: float, top_k: int, top_p: float
    ) -> None:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=30)
        made = await soon(start().generate(self.prompt(6), params, 7))
        self.assert_logprobs(made, temperature, top_k, top_p)
        assert made.temperature == temperature

    async def test_requests_of_one_batch_keep_their_own_parameters(self, start: Start) -> None:
        settings = [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 4, 1.0), (1.5, 0, 0.6), (1.0, 0, 1.0)]
        engine = start()
        made = await soon(
            asyncio.gather(
                *(
                    engine.generate(
                        self.prompt(8, i), SamplingParams(temperature=t, top_k=k, top_p=p, max_tokens=12), seed=i
                    )
                    for i, (t, k, p) in enumerate(settings)
                )
            )
        )
        for generation, (temperature, top_k, top_p) in zip(made, settings, strict=True):
            self.assert_logprobs(generation, temperature, top_k, top_p)

    async def test_greedy_takes_the_likeliest_with_certainty(self, start: Start) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        made = await soon(start().generate(self.prompt(4), params, 1))
        model_TV = self.expected(made)
        assert list(made.completion_ids) == model_TV.argmax(-1).tolist()
        assert made.logprobs == (0.0,) * 20
        np.testing.assert_allclose(made.model_logprobs, model_TV.max(-1), atol=self.tolerance, rtol=0)
        assert made.temperature == 0.0

    @pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 30, 0.9)])
    async def test_tokens_follow_the_distribution(
        self, start: Start, temperature: float, top_k: int, top_p: float
    ) -> None:
        engine, prompt = start(), self.prompt(3)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=1)
        made = await soon(asyncio.gather(*(engine.generate(prompt, params, seed) for seed in range(self.draws))))
        counts = np.bincount([g.completion_ids[0] for g in made], minlength=self.vocabulary)
        table_TV = sampling_logprobs(self.reference_logprobs(prompt), temperature, top_k, top_p)
        assert_fits(counts, np.exp(table_TV[-1]))

    # ---- random numbers -------------------------------------------------------------------------------------------

    async def test_the_same_seed_gives_the_same_tokens(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=30)
        one = await soon(engine.generate(self.prompt(6), params, 11))
        two = await soon(engine.generate(self.prompt(6), params, 11))
        assert one == two
        assert one == await soon(start().generate(self.prompt(6), params, 11))

    async def test_different_seeds_give_different_tokens(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=30)
        made = await soon(asyncio.gather(*(engine.generate(self.prompt(6), params, seed) for seed in range(20))))
        assert len({g.completion_ids for g in made}) == 20

    @pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70])
    async def test_any_integer_is_a_seed(self, start: Start, seed: int) -> None:
        assert (
            len((await soon(start().generate(self.prompt(4), SamplingParams(max_tokens=3), seed))).completion_ids) == 3
        )

    async def test_a_shorter_request_is_the_beginning_of_a_longer_one(self, start: Start) -> None:
        engine = start()
        short = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=7), 5))
        long = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=30), 5))
        self.assert_same(short, long, tokens=7)

    async def test_a_crowd_does_not_change_a_request(self, start: Start) -> None:
        engine = start()
        alone = [await soon(engine.generate(self.prompt(n, 9), SamplingParams(max_tokens=70), n)) for n in (1, 5, 19)]
        crowded = asyncio.gather(
            *(engine.generate(self.prompt(n, 9), SamplingParams(max_tokens=70), n) for n in (1, 5, 19))
        )
        await self.crowd(engine, self.others)
        for one, other in zip(alone, await soon(crowded), strict=True):
            self.assert_same(one, other)

    async def test_a_group_with_one_prompt_gives_what_each_gives_alone(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=20)
        group = await soon(asyncio.gather(*(engine.generate(self.prompt(12), params, seed) for seed in range(6))))
        for seed, generation in enumerate(group):
            self.assert_same(generation, await soon(engine.generate(self.prompt(12), params, seed)))

    # ---- joining and leaving --------------------------------------------------------------------------------------

    async def test_requests_join_while_others_are_decoded(self, start: Start) -> None:
        engine = start()
        long, short = SamplingParams(max_tokens=self.long), SamplingParams(max_tokens=20)
        alone = await soon(engine.generate(self.prompt(9), long, 1))
        joined_alone = [await soon(engine.generate(self.prompt(9), short, seed)) for seed in (2, 3)]
        first = asyncio.ensure_future(engine.generate(self.prompt(9), long, 1))
        await under_way(engine, 12)
        others = [asyncio.ensure_future(engine.generate(self.prompt(9), short, seed)) for seed in (2, 3)]
        await submitted(engine, 3)
        await engine.resume()
        made = await soon(asyncio.gather(*others))
        self.assert_same(await soon(first), alone)
        for one, other in zip(joined_alone, made, strict=True):
            self.assert_same(one, other)

    async def test_more_requests_than_places_are_all_served(self, start: Start) -> None:
        made = await self.crowd(start(max_batch=3), self.others)
        wide = await self.crowd(start(), self.others)
        for one, other in zip(made, wide, strict=True):
            self.assert_same(one, other)

    async def test_short_requests_do_not_wait_for_long_ones(self, start: Start) -> None:
        engine = start(max_batch=2)
        long = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
        for seed in range(3):
            await soon(engine.generate(self.prompt(5, seed), SamplingParams(max_tokens=4), seed))
        assert not long.done()
        assert len((await soon(long)).completion_ids) == self.long

    async def test_a_cancelled_request_frees_its_place(self, start: Start) -> None:
        engine, params = start(max_batch=1), SamplingParams(max_tokens=self.long)
        running = asyncio.ensure_future(engine.generate(self.prompt(5), params, 1))
        waiting = asyncio.ensure_future(engine.generate(self.prompt(5), params, 2))
        next_up = asyncio.ensure_future(engine.generate(self.prompt(7), SamplingParams(max_tokens=6), 3))
        await submitted(engine, 3)
        await under_way(engine, 3)
        running.cancel()
        waiting.cancel()
        await asyncio.sleep(0)
        await engine.resume()
        self.assert_logprobs(await soon(next_up))
        assert running.cancelled() and waiting.cancelled()
        assert engine.health().generated_tokens < self.long
        assert (engine.health().running, engine.health().waiting) == (0, 0)

    async def test_a_cancelled_neighbour_does_not_change_a_request(self, start: Start) -> None:
        engine = start()
        alone = await soon(engine.generate(self.prompt(6, 1), SamplingParams(max_tokens=60), 1))
        doomed = [
            asyncio.ensure_future(engine.generate(self.prompt(8, s), SamplingParams(max_tokens=self.long), s))
            for s in range(3)
        ]
        kept = asyncio.ensure_future(engine.generate(self.prompt(6, 1), SamplingParams(max_tokens=60), 1))
        await submitted(engine, 4)
        await under_way(engine, 40)
        for task in doomed:
            task.cancel()
        await asyncio.sleep(0)
        await engine.resume()
        self.assert_same(await soon(kept), alone)

    # ---- where it ends --------------------------------------------------------------------------------------------

    async def test_max_tokens_of_the_call_wins_over_the_default(self, start: Start) -> None:
        engine = start(defaults=SamplingParams(max_tokens=5, temperature=0.5))
        made = await soon(engine.generate(self.prompt(4), SamplingParams(), 1))
        assert (len(made.completion_ids), made.finish_reason, made.temperature) == (5, "length", 0.5)
        made = await soon(engine.generate(self.prompt(4), SamplingParams(max_tokens=8), 1))
        assert (len(made.completion_ids), made.finish_reason) == (8, "length")

    async def test_parameters_of_the_caller_are_not_changed(self, start: Start) -> None:
        params, prompt = SamplingParams(stop_token_ids=(3,), max_tokens=2), self.prompt(4)
        kept_params, kept_prompt = replace(params), list(prompt)
        await soon(start(eos_ids=(4,)).generate(prompt, params, 1))
        assert params == kept_params and params.temperature is None
        assert prompt == kept_prompt

    async def test_the_model_length_ends_a_request_and_says_so(self, start: Start) -> None:
        engine = start(max_model_length=24)
        made = await soon(engine.generate(self.prompt(20), SamplingParams(max_tokens=50), 1))
        assert (len(made.completion_ids), made.finish_reason) == (4, "model_length")
        made = await soon(engine.generate(self.prompt(20), SamplingParams(max_tokens=4), 1))
        assert (len(made.completion_ids), made.finish_reason) == (4, "length")
        made = await soon(engine.generate(self.prompt(23), SamplingParams(max_tokens=50), 1))
        assert (len(made.completion_ids), made.finish_reason) == (1, "model_length")
        self.assert_logprobs(made)

    @pytest.mark.parametrize("length", [24, 60])
    async def test_a_prompt_without_room_is_refused(self, start: Start, length: int) -> None:
        with pytest.raises(EngineError, match=rf"{length} tokens.*max_model_length 24"):
            await soon(start(max_model_length=24).generate(self.prompt(length), SamplingParams(), 1))

    async def test_an_empty_prompt_is_refused(self, start: Start) -> None:
        with pytest.raises(EngineError, match="at least one token"):
            await soon(start().generate([], SamplingParams(), 1))

    async def test_an_unreadable_prompt_fails_alone(self, start: Start) -> None:
        engine = start()
        neighbour = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
        odd: list[Any] = [self.vocabulary, -1, 1.5, "token"]
        for token in odd:
            with pytest.raises(EngineError, match="token"):
                await soon(engine.generate([3, token, 4], SamplingParams(), 1))
        assert len((await soon(neighbour)).completion_ids) == self.long

    async def test_a_stop_token_ends_a_request_and_is_kept(self, start: Start) -> None:
        engine = start()
        free = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40), 21))
        stop = free.completion_ids[17]
        end = free.completion_ids.index(stop) + 1
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40, stop_token_ids=(stop,)), 21))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids[:end], "stop")

    async def test_the_end_of_sequence_stops_unless_ignored(self, start: Start) -> None:
        free = await soon(start().generate(self.prompt(6), SamplingParams(max_tokens=40), 21))
        eos, other = free.completion_ids[17], free.completion_ids[30]
        end = free.completion_ids.index(eos) + 1
        engine = start(eos_ids=(eos,))
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40), 21))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids[:end], "stop")
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40, ignore_eos=True), 21))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids, "length")
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(other,))
        made = await soon(engine.generate(self.prompt(6), params, 21))
        assert made.completion_ids == free.completion_ids[: free.completion_ids.index(other) + 1]

    async def test_a_token_that_is_both_last_and_stop_counts_as_stop(self, start: Start) -> None:
        free = await soon(start().generate(self.prompt(6), SamplingParams(max_tokens=1), 21))
        engine = start(eos_ids=free.completion_ids)
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=1), 21))
        assert made.finish_reason == "stop"

    async def test_a_stop_string_may_span_tokens(self, start: Start) -> None:
        engine = start()
        free = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=60), 22))
        text = self.detokenize(free.completion_ids[20:24])
        stop = text[1:-1]
        assert stop not in self.detokenize(free.completion_ids[:23])
        params = SamplingParams(max_tokens=60, stop=("never this", stop))
        made = await soon(engine.generate(self.prompt(6), params, 22))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids[:24], "stop")

    async def test_stop_strings_are_not_searched_in_the_prompt(self, start: Start) -> None:
        prompt = self.prompt(6)
        params = SamplingParams(max_tokens=5, temperature=0.0, stop=(self.detokenize(prompt),))
        made = await soon(start().generate(prompt, params, 1))
        assert (len(made.completion_ids), made.finish_reason) == (5, "length")

    # ---- scoring --------------------------------------------------------------------------------------------------

    async def test_compute_logprobs_scores_every_token_but_the_first(self, start: Start) -> None:
        rows = [self.prompt(n, n) for n in (2, 30, 1, 7)]
        scored = await soon(start().compute_logprobs([*rows, []]))
        assert [len(row) for row in scored] == [1, 29, 0, 6, 0]
        for row, got in zip(rows, scored, strict=False):
            table_TV = self.reference_logprobs(row[:-1]) if len(row) > 1 else np.zeros((0, self.vocabulary))
            want = [table_TV[i, token] for i, token in enumerate(row[1:])]
            np.testing.assert_allclose(got, want, atol=self.tolerance, rtol=0)

    async def test_compute_logprobs_agrees_with_generate(self, start: Start) -> None:
        engine = start()
        made = await self.crowd(engine, 12)
        scored = await soon(engine.compute_logprobs([[*g.prompt_ids, *g.completion_ids] for g in made]))
        for generation, row in zip(made, scored, strict=True):
            got = row[len(generation.prompt_ids) - 1 :]
            np.testing.assert_allclose(got, generation.model_logprobs, atol=self.tolerance, rtol=0)

    async def test_compute_logprobs_does_not_disturb_generation(self, start: Start) -> None:
        engine = start()
        alone = await soon(engine.generate(self.prompt(5), SamplingParams(max_tokens=60), 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=60), 1))
        await under_way(engine, 4)
        await soon(engine.compute_logprobs([self.prompt(40)]))  # works while paused, too
        await engine.resume()
        await soon(engine.compute_logprobs([self.prompt(3)]))
        self.assert_same(await soon(task), alone)

    async def test_compute_logprobs_refuses_what_the_model_cannot_read(self, start: Start) -> None:
        engine = start(max_model_length=24)
        with pytest.raises(EngineError, match=r"25 tokens.*max_model_length 24"):
            await soon(engine.compute_logprobs([self.prompt(3), self.prompt(25)]))
        with pytest.raises(EngineError, match="token"):
            await soon(engine.compute_logprobs([[3, self.vocabulary]]))
        assert await soon(engine.compute_logprobs([self.prompt(24)]))

    # ---- versions, pauses, memory ---------------------------------------------------------------------------------

    async def test_new_weights_change_later_tokens_only(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=self.long)
        undisturbed = await soon(engine.generate(self.prompt(8), params, 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(8), params, 1))
        await under_way(engine, 20)
        await soon(engine.load_weights(1, self.change_weights()))
        await engine.resume()
        made = await soon(task)
        before = made.versions.count(0)
        assert 20 <= before < self.long
        assert made.versions == (0,) * before + (1,) * (self.long - before)
        self.assert_same(made, undisturbed, tokens=before)
        assert made.completion_ids != undisturbed.completion_ids

    async def test_requests_after_new_weights_know_nothing_of_the_old(self, start: Start) -> None:
        engine = start()
        old = asyncio.ensure_future(engine.generate(self.prompt(8), SamplingParams(max_tokens=self.long), 1))
        await under_way(engine, 5)
        await soon(engine.load_weights(7, self.change_weights()))
        assert engine.health().version == 7
        # the prompt of one that is under way, whose cache is of the old weights
        new = asyncio.ensure_future(engine.generate(self.prompt(8), SamplingParams(max_tokens=15), 2))
        await submitted(engine, 2)
        await engine.resume()
        made = await soon(new)
        assert made.versions == (7,) * 15
        self.assert_logprobs(made)
        await soon(old)

    async def test_a_paused_engine_decodes_nothing_and_goes_on_where_it_was(self, start: Start) -> None:
        engine = start()
        alone = await soon(engine.generate(self.prompt(5), SamplingParams(max_tokens=80), 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=80), 1))
        await under_way(engine, 5)
        late = asyncio.ensure_future(engine.generate(self.prompt(6), SamplingParams(max_tokens=5), 2))
        await submitted(engine, 2)
        still = engine.health()
        assert still.paused
        await asyncio.sleep(0.03)
        assert engine.health().generated_tokens == still.generated_tokens
        assert not task.done() and not late.done()
        await engine.pause()  # twice is as good as once
        await engine.resume()
        self.assert_same(await soon(task), alone)
        assert len((await soon(late)).completion_ids) == 5
        assert not engine.health().paused

    async def test_a_released_cache_is_rebuilt(self, start: Start) -> None:
        engine = start()
        first = await self.crowd(engine, 6)
        await soon(engine.release_cache())
        assert await self.crowd(engine, 6) == first
        await soon(engine.release_cache())
        await soon(engine.release_cache())

    async def test_releasing_the_cache_harms_no_request(self, start: Start) -> None:
        engine = start()
        alone = await soon(engine.generate(self.prompt(5), SamplingParams(max_tokens=50), 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=50), 1))
        await under_way(engine, 5)
        await soon(engine.release_cache())
        await engine.resume()
        self.assert_same(await soon(task), alone)

    async def test_health_counts(self, start: Start) -> None:
        engine = start(max_batch=2)
        idle = engine.health()
        assert idle.alive and not idle.paused and idle.error is None
        assert (idle.version, idle.running, idle.waiting, idle.generated_tokens) == (0, 0, 0, 0)
        tasks = [
            asyncio.ensure_future(engine.generate(self.prompt(4, s), SamplingParams(max_tokens=60), s))
            for s in range(5)
        ]
        await submitted(engine, 5)
        await under_way(engine, 2)
        busy = engine.health()
        assert (busy.running, busy.waiting) == (2, 3)
        await engine.resume()
        await soon(asyncio.gather(*tasks))
        done = engine.health()
        assert (done.running, done.waiting, done.generated_tokens) == (0, 0, 300)
        assert done.busy_s > 0

    # ---- the end --------------------------------------------------------------------------------------------------

    async def test_closing_fails_what_is_under_way(self, start: Start) -> None:
        engine = start(max_batch=1)
        tasks = [
            asyncio.ensure_future(engine.generate(self.prompt(4, s), SamplingParams(max_tokens=self.long), s))
            for s in range(3)
        ]
        await submitted(engine, 3)
        await under_way(engine, 2)
        await soon(engine.close())
        for task in tasks:
            with pytest.raises(EngineError, match="closed"):
                await soon(task)
        with pytest.raises(EngineError, match="closed"):
            await soon(engine.generate(self.prompt(4), SamplingParams(), 1))
        with pytest.raises(EngineError, match="closed"):
            await soon(engine.compute_logprobs([self.prompt(4)]))
        assert not engine.health().alive
        await soon(engine.close())  # twice is as good as once

    async def test_a_crash_reaches_every_caller_and_is_remembered(self, start: Start) -> None:
        engine = start(max_batch=2)
        tasks = [
            asyncio.ensure_future(engine.generate(self.prompt(4, s), SamplingParams(max_tokens=self.long), s))
            for s in range(5)
        ]
        await submitted(engine, 5)
        await under_way(engine, 2)
        words = self.break_model()
        await engine.resume()
        for task in tasks:
            with pytest.raises(EngineError, match=words):
                await soon(task)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: engine.generate(self.prompt(4), SamplingParams(), 1),
            lambda: engine.compute_logprobs([self.prompt(4)]),
            lambda: engine.load_weights(1),
        ]
        for call in calls:
            with pytest.raises(EngineError, match=words):
                await soon(call())
        health = engine.health()
        assert health.error is not None and words in health.error
        await soon(engine.close())
        assert not engine.health().alive
