"""What every rollout engine must do about weights: weight syncs in flight, pinned versions, memory, starting again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from contracts.engine_harness import EngineHarness, Start, soon, submitted, under_way, until
from headrace.engines.base import EvaluationView, Generation, RolloutEngine, SamplingParams
from headrace.errors import EngineError


class WeightsContract(EngineHarness):
    """The part of `EngineContract` that is about weights."""

    def asked(
        self, engine: RolloutEngine, tokens: int, seed: int = 1, pinned: bool = False
    ) -> asyncio.Future[Generation]:
        return asyncio.ensure_future(
            engine.generate(self.prompt(8), SamplingParams(max_tokens=tokens), seed, pinned=pinned)
        )

    def far_from_reference(self, made: Generation, first: int) -> float:
        """How far the log-probabilities from token `first` on are from the reference's, at most."""
        chosen = np.array(made.completion_ids)[:, None]
        expected = np.take_along_axis(self.expected(made), chosen, 1)[:, 0]
        return float(np.abs(expected - made.model_logprobs)[first:].max())

    # ---- weight syncs ---------------------------------------------------------------------------------------------

    async def test_a_sync_ends_with_the_digest_of_what_is_served(self, start: Start) -> None:
        engine = start()
        first = await self.sync(engine, 1)
        assert first == self.digest() == await self.sync(engine, 2)
        await soon(engine.pause())
        self.change_weights()
        changed = await self.sync(engine, 3)
        assert changed == self.digest() != first

    async def in_flight(self, engine: RolloutEngine) -> tuple[Generation, int]:
        """A sequence that lived through a weight sync, and how many tokens it had by then."""
        task = self.asked(engine, self.long)
        await under_way(engine, 20)
        self.change_weights()
        await self.sync(engine, 1)
        await engine.resume()
        made = await soon(task)
        before = made.versions.count(0)
        assert 20 <= before < self.long
        assert made.versions == (0,) * before + (1,) * (self.long - before)
        return made, before

    async def test_a_kept_cache_still_remembers_the_old_weights(self, start: Start) -> None:
        made, before = await self.in_flight(start(cache_on_publish="keep"))
        assert self.far_from_reference(made, before) > 10 * self.long_tolerance

    async def test_a_recomputed_cache_is_that_of_the_new_weights(self, start: Start) -> None:
        made, before = await self.in_flight(start(cache_on_publish="recompute"))
        assert self.far_from_reference(made, before) < self.long_tolerance

    async def test_recomputing_serves_all_that_are_in_flight(self, start: Start) -> None:
        engine = start(cache_on_publish="recompute", prefill_tokens=50)
        tasks = [
            asyncio.ensure_future(engine.generate(self.prompt(n, n), SamplingParams(max_tokens=self.long), n))
            for n in (1, 3, 8, 20)
        ]
        await submitted(engine, 4)
        await under_way(engine, 40, each=True)
        self.change_weights()
        await self.sync(engine, 5)
        await engine.resume()
        for made in await soon(asyncio.gather(*tasks)):
            assert set(made.versions) == {0, 5}
            assert self.far_from_reference(made, made.versions.count(0)) < self.long_tolerance

    # ---- pinned versions ------------------------------------------------------------------------------------------

    async def test_pinned_requests_keep_the_weights_they_were_promised(self, start: Start) -> None:
        self.need_pins()
        engine = start()
        old = await self.asked(engine, 30)
        await self.sync(engine, 3)
        assert await soon(engine.pin()) == 3
        await soon(engine.pause())
        self.change_weights()
        await self.sync(engine, 4)
        await engine.resume()
        pinned, live = await soon(asyncio.gather(self.asked(engine, 30, pinned=True), self.asked(engine, 30)))
        self.assert_same(pinned, old)
        assert (set(pinned.versions), set(live.versions)) == ({3}, {4})
        self.assert_logprobs(live)
        viewed = await soon(EvaluationView(engine).generate(self.prompt(8), SamplingParams(max_tokens=30), 1))
        assert viewed == pinned
        await soon(engine.unpin())
        self.assert_same(await soon(self.asked(engine, 30, pinned=True)), live)

    async def test_weight_syncs_leave_pinned_requests_under_way_alone(self, start: Start) -> None:
        self.need_pins()
        engine = start(cache_on_publish="recompute")
        alone = await soon(self.asked(engine, self.long))
        await soon(engine.pin())
        tasks = [self.asked(engine, self.long, pinned=True), self.asked(engine, self.long)]
        await submitted(engine, 2)
        await under_way(engine, 20)
        self.change_weights()
        await self.sync(engine, 1)
        await engine.resume()
        pinned, live = await soon(asyncio.gather(*tasks))
        self.assert_same(pinned, alone)
        assert (set(pinned.versions), set(live.versions)) == ({0}, {0, 1})
        await soon(engine.unpin())

    async def test_unpinning_waits_for_pinned_requests(self, start: Start) -> None:
        self.need_pins()
        engine = start()
        await soon(engine.pin())
        task = self.asked(engine, self.long, pinned=True)
        await under_way(engine, 5)
        self.change_weights()
        await self.sync(engine, 1)
        unpinned = asyncio.ensure_future(engine.unpin())
        await asyncio.sleep(0.3)  # until the engine has heard of it, on a busy machine, too
        late = self.asked(engine, 5, pinned=True)
        await submitted(engine, 2)
        assert not unpinned.done()
        await engine.resume()
        await soon(unpinned)
        assert set((await soon(task)).versions) == {0}
        assert set((await soon(late)).versions) == {1}
        assert await soon(engine.pin()) == 1

    async def test_unpinning_does_not_wait_for_requests_that_were_cancelled(self, start: Start) -> None:
        self.need_pins()
        engine = start(max_batch=1)
        await soon(engine.pin())
        tasks = [self.asked(engine, self.long, seed, pinned=True) for seed in range(3)]
        await submitted(engine, 3)
        await under_way(engine, 5)
        for task in tasks:
            task.cancel()
        await soon(engine.unpin())  # though the engine is paused
        assert (engine.health().running, engine.health().waiting) == (0, 0)

    async def test_one_version_is_pinned_at_a_time(self, start: Start) -> None:
        engine = start()
        with pytest.raises(EngineError, match="nothing is pinned"):
            await soon(engine.unpin())
        await self.sync(engine, 6)
        await soon(engine.pin())
        with pytest.raises(EngineError, match="version 6 is pinned already"):
            await soon(engine.pin())
        await soon(engine.unpin())
        with pytest.raises(EngineError, match="nothing is pinned"):
            await soon(engine.unpin())

    @pytest.mark.parametrize("pin", [False, True])
    async def test_pinned_requests_go_before_all_that_wait(self, start: Start, pin: bool) -> None:
        engine = start(max_batch=1)
        if pin:
            self.need_pins()
            await soon(engine.pin())
        ended: list[str] = []
        first = self.asked(engine, self.long)
        await under_way(engine, 2)
        tasks = {
            **{f"waiting {i}": self.asked(engine, 3, seed=i) for i in range(3)},
            **{f"pinned {i}": self.asked(engine, 3, seed=i, pinned=True) for i in range(2)},
            "first": first,
        }
        for name, task in tasks.items():
            task.add_done_callback(lambda _, name=name: ended.append(name))
        await submitted(engine, 6)
        await engine.resume()
        await soon(asyncio.gather(*tasks.values()))
        usual = ["first", "pinned 0", "pinned 1", "waiting 0", "waiting 1", "waiting 2"]
        # pinned weights have places of their own
        assert ended == (["pinned 0", "pinned 1", "first", *usual[3:]] if pin else usual)

    # ---- memory ---------------------------------------------------------------------------------------------------

    async def test_a_cache_released_in_flight_is_rebuilt(self, start: Start) -> None:
        engine, lengths = start(), (1, 2, 9, 9, 17)
        params = SamplingParams(max_tokens=self.long)
        alone = [await soon(engine.generate(self.prompt(n), params, seed)) for seed, n in enumerate(lengths)]
        await soon(engine.pin())
        tasks = [
            asyncio.ensure_future(engine.generate(self.prompt(n), params, seed, pinned=seed % 2 == 1))
            for seed, n in enumerate(lengths)
        ]
        await submitted(engine, len(lengths))
        for _ in range(3):
            await under_way(engine, 40)
            await soon(engine.release_cache())
            await engine.resume()
        for made, expected in zip(await soon(asyncio.gather(*tasks)), alone, strict=True):
            self.assert_same(made, expected)
        await soon(engine.unpin())

    async def test_who_joins_or_leaves_without_a_cache_disturbs_no_one(self, start: Start) -> None:
        engine = start()
        alone = await soon(self.asked(engine, self.long))
        doomed, kept = self.asked(engine, self.long, seed=2), self.asked(engine, self.long)
        await submitted(engine, 2)
        await under_way(engine, 20)
        await soon(engine.release_cache())
        doomed.cancel()
        await until(lambda: engine.health().running == 1)
        joined = self.asked(engine, self.long)
        await submitted(engine, 2)
        await engine.resume()
        for made in await soon(asyncio.gather(kept, joined)):
            self.assert_same(made, alone)

    async def test_the_cache_is_not_released_under_sequences_being_decoded(self, start: Start) -> None:
        engine = start()
        task = self.asked(engine, self.long)
        await under_way(engine, 1)
        await engine.resume()
        with pytest.raises(EngineError, match="1 sequences are being decoded; pause"):
            await soon(engine.release_cache())
        await soon(task)

    # ---- starting again -------------------------------------------------------------------------------------------

    async def test_a_restarted_engine_loses_nothing(self, start: Start) -> None:
        engine = start(max_batch=2)
        alone = [await soon(self.asked(engine, self.long, seed)) for seed in range(4)]
        await self.sync(engine, 2)
        tasks = [self.asked(engine, self.long, seed) for seed in range(4)]
        await submitted(engine, 4)
        await under_way(engine, 10)
        await soon(engine.restart())
        health = engine.health()
        assert health.paused and health.alive and health.restarts == 1
        await engine.resume()
        for made, expected in zip(await soon(asyncio.gather(*tasks)), alone, strict=True):
            self.assert_same(made, expected)
            assert set(made.versions) == {2}

    async def test_a_restart_keeps_what_is_pinned(self, start: Start) -> None:
        self.need_pins()
        engine = start()
        alone = await soon(self.asked(engine, self.long))
        await soon(engine.pin())
        task = self.asked(engine, self.long, pinned=True)
        await under_way(engine, 5)
        self.change_weights()
        await self.sync(engine, 1)
        await soon(engine.restart())
        await engine.resume()
        made, live = await soon(asyncio.gather(task, self.asked(engine, 20)))
        self.assert_same(made, alone)
        assert (set(made.versions), set(live.versions)) == ({0}, {1})
        self.assert_logprobs(live)
        await soon(engine.unpin())
