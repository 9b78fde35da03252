"""The pool and its router: conversations stay, loads spread, and no loss of replicas loses or repeats a request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeEngine, FakeWeights, examples
from headrace.config.loading import build_config
from headrace.engines.base import (
    EngineHealth,
    EvaluationView,
    Generation,
    SamplingParams,
    of_conversation,
    pool_metrics,
)
from headrace.engines.builtin import torch_engine
from headrace.engines.pool import EnginePool
from headrace.engines.routing import SPILL_RATIO, SPILL_REQUESTS, choose, preferred
from headrace.errors import ConfigError, EngineError, PromptTooLongError, ServerLostError, WeightSyncError
from headrace.tracking.console_view import engine_line
from headrace.weights.canary import Canary
from headrace.weights.sync import WeightSync
from virtual_time import run_virtual

PARAMS = SamplingParams(max_tokens=4)
words = st.text(min_size=1, max_size=8)


# ---- routing -------------------------------------------------------------------------------------------------------


@examples
@given(words, st.sets(st.integers(0, 40), min_size=2, max_size=9), st.data())
def test_losing_a_replica_moves_only_its_own_conversations(word: str, replicas: set[int], data: Any) -> None:
    lost = data.draw(st.sampled_from(sorted(replicas)))
    before, after = preferred(word, replicas), preferred(word, replicas - {lost})
    assert after == [one for one in before if one != lost]


def test_conversations_spread_evenly() -> None:
    counts = Counter(preferred(f"group {number}", range(4))[0] for number in range(4000))
    assert all(900 < counts[replica] < 1100 for replica in range(4))


@examples
@given(st.one_of(st.none(), words), st.dictionaries(st.integers(0, 9), st.integers(0, 60), min_size=1))
def test_a_request_never_goes_to_a_replica_with_much_more_to_do(affinity: str | None, loads: dict[int, int]) -> None:
    least = min(loads.values())
    chosen = loads[choose(affinity, list(loads), loads.__getitem__)]
    assert chosen < least + SPILL_REQUESTS or chosen <= SPILL_RATIO * least
    if affinity is None:
        assert chosen == least
    elif len({*loads.values()}) == 1:
        assert choose(affinity, list(loads), loads.__getitem__) == preferred(affinity, loads)[0]


# ---- replicas that die ---------------------------------------------------------------------------------------------


class Mortal(FakeEngine):
    """A replica whose server can be killed. It takes a while to come back, and then has no weights."""

    remembers = False

    def __init__(self, takes_s: float = 1.0, comes_back_s: float = 20.0) -> None:
        super().__init__(takes_s=takes_s)
        self.comes_back_s = comes_back_s
        self.state = "serving"
        self.lives = 0
        self.deaf: asyncio.Event = asyncio.Event()
        self.error: str | None = None
        self.answered: list[int] = []
        self.score = -1.0
        self.paused = False
        self._restore: Callable[[Any], Awaitable[bool]] | None = None

    def when_restarted(self, restore: Callable[[Any], Awaitable[bool]]) -> None:
        self._restore = restore

    async def recovered(self) -> None: ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        life = self.lives
        assert self.state == "serving", "a replica that does not serve was asked"
        work = asyncio.ensure_future(super().generate(prompt_ids, params, seed, pinned))
        dies = asyncio.ensure_future(self.deaf.wait())
        await asyncio.wait({work, dies}, return_when=asyncio.FIRST_COMPLETED)
        dies.cancel()
        if life != self.lives:
            work.cancel()
            raise ServerLostError("the server was killed")
        self.answered.append(seed)
        return work.result()

    def kill(self, for_good: bool = False) -> None:
        self.lives += 1
        self.state, self.restarts = "starting", self.restarts + 1
        self.pinned = self.pinned if self.remembers else None
        self.deaf.set()
        self.deaf = asyncio.Event()
        if for_good:
            self.error = "it cannot be started"
        else:
            self._back = asyncio.ensure_future(self._come_back(self.lives))

    def replace_server(self) -> None:
        self.score = -1.0
        self.kill()

    async def _come_back(self, life: int) -> None:
        await asyncio.sleep(self.comes_back_s)
        if life == self.lives:
            self.state, self.version = "unsynced", 0
            if self._restore is None or await self._restore(self):
                self.state = "serving"

    async def begin_update(self, version: int) -> None:
        if self.state == "starting":
            raise ServerLostError("nobody answers")

    async def end_update(self, version: int) -> Any:
        await self.begin_update(version)
        self.version, self.state = version, "serving"

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.score] * (len(row) - 1) for row in rows]

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    def health(self) -> EngineHealth:
        return replace(super().health(), state=self.state, error=self.error, paused=self.paused)


class Learner(FakeWeights):
    """Weights that never change, sent to whoever takes part."""

    in_place = False

    async def send(self, version: int) -> None: ...


async def score(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


def new_pool(count: int = 2, **options: Any) -> tuple[EnginePool, list[Mortal], WeightSync]:
    engines = [Mortal(**options) for _ in range(count)]
    pool = EnginePool(engines, pins_one=True)
    weights = Learner()
    return pool, engines, WeightSync(weights, weights, pool, Canary(((1, 2, 3),), score, 0.1), pauses=True)


async def asked(pool: EnginePool, count: int, pinned: bool = False) -> list[Generation]:
    return await asyncio.gather(*(pool.generate([5], PARAMS, seed, pinned, f"group {seed}") for seed in range(count)))


def test_requests_of_a_dead_replica_are_answered_elsewhere_with_the_same_seeds() -> None:
    async def work() -> None:
        pool, (first, second), sync = new_pool()
        await sync.sync(1)
        expected = await asked(pool, 12)
        task = asyncio.ensure_future(asked(pool, 12))
        await asyncio.sleep(0.5)
        had = first.busy
        assert had and second.busy
        first.kill()
        assert await task == expected
        assert pool.health().reissued == had
        await asyncio.sleep(25)
        assert (first.state, first.version, pool.health().restarts) == ("serving", 1, 1)
        await asked(pool, 12)
        assert first.most_busy and pool_metrics(pool.health())["engine/serving"] == 2

    run_virtual(work())


@examples
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_no_request_is_lost_or_delivered_twice_whatever_dies_when(seed: int, count: int) -> None:
    async def work() -> None:
        rng = random.Random(seed)
        pool, engines, sync = new_pool(count, comes_back_s=rng.uniform(1, 30))
        await sync.sync(1)

        async def killing() -> None:
            for _ in range(10):
                await asyncio.sleep(rng.uniform(0.1, 10))
                rng.choice(engines).kill()

        async def syncing() -> None:
            for version in range(2, 8):
                await asyncio.sleep(rng.uniform(0.1, 12))
                await sync.sync(version)

        background = [asyncio.ensure_future(killing()), asyncio.ensure_future(syncing())]
        found = await asked(pool, 60)
        await asyncio.gather(*background)
        alone = await asked(EnginePool([FakeEngine()]), 60)
        assert [one.completion_ids for one in found] == [one.completion_ids for one in alone]
        await asyncio.sleep(100)
        assert {engine.version for engine in engines} == {7} and {engine.state for engine in engines} == {"serving"}

    run_virtual(work())


def test_an_answer_of_an_earlier_life_is_refused() -> None:
    class Late(FakeEngine):
        """Loses the connection of one request; what it had before, it answers all the same."""

        broke = False

        async def generate(
            self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
        ) -> Generation:
            if seed == 2 and not self.broke:
                self.broke = True
                raise ServerLostError("the connection broke")
            return await super().generate(prompt_ids, params, seed, pinned)

    async def work() -> None:
        engine = Late(takes_s=5.0)
        pool = EnginePool([engine])
        first = asyncio.ensure_future(pool.generate([5], PARAMS, 1))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(pool.generate([5], PARAMS, 2))
        await asyncio.gather(first, second)
        assert [request.seed for request in engine.requests] == [1, 2, 1]
        assert pool.health().reissued == 2

    run_virtual(work())


def test_a_replica_that_missed_a_sync_serves_only_after_it_has_the_weights() -> None:
    async def work() -> None:
        pool, (first, second), sync = new_pool(comes_back_s=20)
        await sync.sync(1)
        first.kill()
        await sync.sync(2)  # does not wait for it
        assert second.version == 2 and first.state == "starting"
        assert {version for made in await asked(pool, 6) for version in made.versions} == {2}
        await asyncio.sleep(30)
        assert (first.version, first.state, first.paused) == (2, "serving", False)

    run_virtual(work())


class Returning(Mortal):
    """Comes back by itself with the weights that it had, as an engine process does."""

    remembers = True

    async def _come_back(self, life: int) -> None:
        await asyncio.sleep(self.comes_back_s)
        if life == self.lives:
            self.state = "serving"


def test_a_replica_that_comes_back_with_older_weights_is_brought_the_newest_before_it_serves() -> None:
    async def work() -> None:
        first, second = Returning(comes_back_s=20), Returning()
        pool, weights = EnginePool([first, second]), Learner()
        sync = WeightSync(weights, weights, pool)
        await sync.sync(1)
        first.kill()
        await sync.sync(2)
        await asyncio.sleep(30)
        assert (first.version, first.state) == (1, "serving")
        assert {version for made in await asked(pool, 12) for version in made.versions} == {2}
        assert first.version == 2
        assert {version for made in await asked(pool, 12) for version in made.versions} == {2} and first.answered

    run_virtual(work())


def test_a_replica_that_dies_while_all_are_paused_resumes_with_them() -> None:
    async def work() -> None:
        first, second = Returning(comes_back_s=20), Returning()
        pool, weights = EnginePool([first, second]), Learner()
        await WeightSync(weights, weights, pool).sync(1)
        await pool.pause()
        first.kill()
        await pool.resume()
        await asyncio.sleep(30)
        assert (first.state, first.paused, second.paused) == ("serving", True, False)
        await asked(pool, 12)
        assert not first.paused and len(await asked(pool, 12)) == 12 and first.answered

    run_virtual(work())


def test_a_replica_that_cannot_be_started_again_is_noticed_though_nobody_asks_it() -> None:
    async def work() -> None:
        engines = [Returning(), Returning()]
        pool = EnginePool(engines)
        for engine in engines:
            engine.kill()
        task = asyncio.ensure_future(asked(pool, 2))
        await asyncio.sleep(1.0)
        for engine in engines:
            engine.kill(for_good=True)
        with pytest.raises(EngineError, match="no replica is left of 2"):
            await task

    run_virtual(work())


def test_a_replica_that_fails_the_canary_is_replaced_and_all_failing_is_an_error() -> None:
    async def work() -> None:
        _, (first, second), sync = new_pool(comes_back_s=5)
        await sync.sync(1)
        second.score = -4.0
        await sync.sync(2)
        assert (first.state, second.state) == ("serving", "starting")
        await asyncio.sleep(10)
        assert (second.state, second.version) == ("serving", 2)
        first.score = second.score = -4.0
        with pytest.raises(WeightSyncError, match="version 3 is not what the engine decodes with"):
            await sync.sync(3)

    run_virtual(work())


def test_the_pool_ends_only_when_no_replica_is_left() -> None:
    async def work() -> None:
        pool, (first, second), _ = new_pool()
        task = asyncio.ensure_future(asked(pool, 8))
        await asyncio.sleep(0.5)
        first.kill(for_good=True)
        assert len(await task) == 8 and pool.health().error is None and pool.health().alive
        task = asyncio.ensure_future(asked(pool, 2))
        await asyncio.sleep(0.5)
        second.kill(for_good=True)
        with pytest.raises(EngineError, match="no replica is left of 2"):
            await task
        assert "no replica is left" in str(pool.health().error)

    run_virtual(work())


def test_all_replicas_down_for_a_while_is_only_a_wait() -> None:
    async def work() -> None:
        pool, engines, sync = new_pool(comes_back_s=20)
        await sync.sync(1)
        task = asyncio.ensure_future(asked(pool, 8))
        await asyncio.sleep(0.5)
        for engine in engines:
            engine.kill()
        assert {version for made in await task for version in made.versions} == {1}
        for engine in engines:
            engine.kill()
        await sync.sync(2)
        assert {engine.version for engine in engines} >= {2}

    run_virtual(work())


def test_evaluation_keeps_one_replica_at_its_version() -> None:
    async def work() -> None:
        pool, engines, sync = new_pool(3)
        await sync.sync(1)
        assert await pool.pin() == 1
        pinned = asyncio.ensure_future(asked(pool, 6, pinned=True))
        await asyncio.sleep(0.5)
        await sync.sync(2)
        live = await asked(pool, 6)
        assert {version for made in await pinned for version in made.versions} == {1}
        assert {version for made in live for version in made.versions} == {2}
        assert sorted(engine.version for engine in engines) == [1, 2, 2]
        await pool.unpin()
        assert [engine.version for engine in engines] == [2, 2, 2]
        with pytest.raises(EngineError, match="nothing is pinned"):
            await pool.unpin()

    run_virtual(work())


def test_an_evaluation_waits_for_a_second_replica_that_is_being_started() -> None:
    async def work() -> None:
        pool, (first, second), sync = new_pool()
        await sync.sync(1)
        first.kill()
        assert await pool.pin() == 1
        assert all(one.serves for one in pool.replicas)
        await pool.unpin()
        second.kill(for_good=True)
        pool.replicas[1].gone = EngineError("it cannot be started")
        with pytest.raises(EngineError, match="1 of 2 replicas are left, and evaluation beside training needs one"):
            await pool.pin()

    run_virtual(work())


def test_the_loss_of_the_only_replica_with_a_pinned_version_is_explained() -> None:
    async def work() -> None:
        pool, engines, sync = new_pool(2)
        await sync.sync(1)
        await pool.pin()
        await sync.sync(2)
        task = asyncio.ensure_future(asked(pool, 1, pinned=True))
        await asyncio.sleep(0.5)
        next(engine for engine in engines if engine.version == 1).kill()
        with pytest.raises(EngineError, match="which alone had the pinned version 1, is lost"):
            await task

    run_virtual(work())


def test_a_sync_waits_for_a_replica_if_only_the_one_that_evaluates_is_there() -> None:
    async def work() -> None:
        pool, engines, sync = new_pool()
        await sync.sync(1)
        await pool.pin()
        next(engine for engine in engines if engine.pinned is None).kill()
        await sync.sync(2)
        assert {version for made in await asked(pool, 3, pinned=True) for version in made.versions} == {1}
        await pool.unpin()
        assert [engine.version for engine in engines] == [2, 2]

    run_virtual(work())


def test_a_pinned_version_outlives_the_replica_that_was_lost_before_newer_weights_came() -> None:
    async def work() -> None:
        pool, engines, sync = new_pool(3)
        await sync.sync(1)
        await pool.pin()
        task = asyncio.ensure_future(asked(pool, 4, pinned=True))
        await asyncio.sleep(0.5)
        next(engine for engine in engines if engine.busy).kill()
        await task
        await sync.sync(2)
        assert {version for made in await asked(pool, 6, pinned=True) for version in made.versions} == {1}
        await pool.unpin()
        await asyncio.sleep(30)
        assert [engine.version for engine in engines] == [2, 2, 2]

    run_virtual(work())


class Strict(Returning):
    """Keeps pinned weights, as an engine process does, and refuses what comes out of turn."""

    async def pin(self) -> int:
        assert self.pinned is None
        return await super().pin()

    async def unpin(self) -> None:
        assert self.pinned is not None
        await super().unpin()


@pytest.mark.parametrize("away", ["pin", "unpin"])
def test_a_replica_that_is_away_at_a_pin_or_an_unpin_changes_no_evaluation(away: str) -> None:
    async def work() -> None:
        engines = first, _ = Strict(), Strict()
        pool, weights = EnginePool(engines), Learner()
        sync = WeightSync(weights, weights, pool)
        await sync.sync(1)
        if away == "pin":
            first.kill()
        await pool.pin()
        if away == "pin":
            await asyncio.sleep(30)
        else:
            first.kill()
        await sync.sync(2)
        assert {version for made in await asked(pool, 12, pinned=True) for version in made.versions} == {1}
        await pool.unpin()
        await asyncio.sleep(30)
        assert [engine.pinned for engine in engines] == [None, None]
        assert {version for made in await asked(pool, 12) for version in made.versions} == {2}
        await pool.pin()

    run_virtual(work())


@pytest.mark.parametrize("fault", ["lost before", "lost meanwhile", "other weights"])
def test_a_replica_that_cannot_catch_up_after_an_evaluation_is_replaced(fault: str) -> None:
    async def work() -> None:
        engines = [Mortal(comes_back_s=5) for _ in range(2)]
        pool, weights = EnginePool(engines, pins_one=True), Learner()

        class Sender(Learner):
            async def send(self, version: int) -> None:
                if fault == "lost meanwhile" and len(sent) == 2:
                    old.kill()
                sent.append(version)

        sent: list[int] = []
        sync = WeightSync(weights, Sender(), pool, Canary(((1, 2, 3),), score, 0.1), pauses=True)
        await sync.sync(1)
        await pool.pin()
        await sync.sync(2)
        old = next(engine for engine in engines if engine.version == 1)
        if fault == "lost before":
            old.kill()
        old.score = -4.0 if fault == "other weights" else old.score
        await pool.unpin()
        await asyncio.sleep(60)
        assert [engine.version for engine in engines] == [2, 2]
        assert all(one.serves for one in pool.replicas)

    run_virtual(work())


def test_a_pause_while_all_replicas_are_started_again_ends_nothing() -> None:
    async def work() -> None:
        pool, engines, sync = new_pool()
        await sync.sync(1)
        for engine in engines:
            engine.kill()
        await pool.pause()
        await pool.release_cache()
        await asyncio.sleep(30)
        assert [engine.paused for engine in engines] == [True, True]
        await pool.resume()
        assert len(await asked(pool, 4)) == 4

    run_virtual(work())


def test_a_request_that_no_replica_could_answer_fails_at_once() -> None:
    async def work() -> None:
        pool = EnginePool([FakeEngine(room=1), FakeEngine(room=1)])
        with pytest.raises(PromptTooLongError):
            await pool.generate([5, 6], PARAMS, 1)
        assert pool.health().reissued == 0

    run_virtual(work())


def test_a_conversation_stays_with_its_replica_in_training_and_evaluation() -> None:
    async def work() -> None:
        engines = [FakeEngine(), FakeEngine(), FakeEngine()]
        pool = EnginePool(engines)
        for view in (pool, EvaluationView(pool)):
            before = [len(engine.requests) for engine in engines]
            for seed in range(9):
                await of_conversation(view, "group 7").generate([5], PARAMS, seed)
            grown = [len(engine.requests) - had for engine, had in zip(engines, before, strict=True)]
            assert sorted(grown) == [0, 0, 9]
        alone = FakeEngine()
        assert of_conversation(alone, "group 7") is alone

    run_virtual(work())


# ---- what people see -----------------------------------------------------------------------------------------------


def test_the_console_shows_the_load_of_every_replica() -> None:
    fine = EngineHealth(True, False, 1, 3, 1, 0, 0.0)
    health = replace(fine, replicas=(fine, replace(fine, state="starting"), replace(fine, error="x")))
    assert "replicas 4 · starting · lost" in engine_line(health).plain
    assert pool_metrics(health)["engine/serving"] == 1


def test_replicas_of_the_torch_engine_need_processes_of_their_own() -> None:
    with pytest.raises(ConfigError, match='set trainer\\.placement = "separate"'):
        torch_engine.abilities(build_config({"engine": {"replicas": 2}}))
