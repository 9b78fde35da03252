"""What every rollout engine must do. Subclass `EngineContract`, supply what is abstract, and pass all of it.

Only the `RolloutEngine` protocol is used, so that an engine in another process or behind HTTP can be held to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from contracts.engine_harness import Start, soon, submitted, under_way
from contracts.engine_sampling import SamplingContract
from contracts.engine_weights import WeightsContract
from headrace.engines.base import SamplingParams
from headrace.errors import DataError, EngineError


class EngineContract(SamplingContract, WeightsContract):
    """One suite for all engines."""

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
        alone = await soon(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
        await under_way(engine, 4)
        await soon(engine.compute_logprobs([self.prompt(40)]))  # works while paused, too
        await engine.resume()
        await soon(engine.compute_logprobs([self.prompt(3)]))
        self.assert_same(await soon(task), alone)

    async def test_compute_logprobs_refuses_what_the_model_cannot_read(self, start: Start) -> None:
        engine = start(max_model_length=24)
        with pytest.raises(DataError, match=r"25 tokens.*max_model_length 24"):
            await soon(engine.compute_logprobs([self.prompt(3), self.prompt(25)]))
        with pytest.raises(DataError, match="not a token id"):
            await soon(engine.compute_logprobs([[3, self.vocabulary]]))
        assert await soon(engine.compute_logprobs([self.prompt(24)]))

    # ---- versions, pauses, memory ---------------------------------------------------------------------------------

    async def test_new_weights_change_later_tokens_only(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=self.long)
        undisturbed = await soon(engine.generate(self.prompt(8), params, 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(8), params, 1))
        await under_way(engine, 20)
        self.change_weights()
        await self.sync(engine, 1)
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
        self.change_weights()
        await self.sync(engine, 7)
        assert engine.health().version == 7
        # the prompt of one that is under way, whose cache is of the old weights
        new = asyncio.ensure_future(engine.generate(self.prompt(8), SamplingParams(max_tokens=15), 2))
        await submitted(engine, 2)
        await engine.resume()
        made = await soon(new)
        assert made.versions == (7,) * 15
        self.assert_logprobs(made)
        await soon(old)

    async def test_a_paused_engine_decodes_nothing_and_continues_where_it_was(self, start: Start) -> None:
        engine = start()
        alone = await soon(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
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
        for one, other in zip(await self.crowd(engine, 6), first, strict=True):
            self.assert_same(one, other)
        await soon(engine.release_cache())
        await soon(engine.release_cache())

    async def test_releasing_the_cache_harms_no_request(self, start: Start) -> None:
        engine = start()
        alone = await soon(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
        task = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
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
            asyncio.ensure_future(engine.generate(self.prompt(4, s), SamplingParams(max_tokens=self.long), s))
            for s in range(5)
        ]
        await submitted(engine, 5)
        await under_way(engine, 2)
        busy = engine.health()
        assert (busy.running, busy.waiting) == (2, 3)
        await engine.resume()
        await soon(asyncio.gather(*tasks))
        done = engine.health()
        assert (done.running, done.waiting, done.generated_tokens) == (0, 0, 5 * self.long)
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
            lambda: self.sync(engine, 1),
        ]
        for call in calls:
            with pytest.raises(EngineError, match=words):
                await soon(call())
        health = engine.health()
        assert health.error is not None and words in health.error
        await soon(engine.close())
        assert not engine.health().alive
