"""EnginePool: N replicas of any kind behind the engine protocol.

A conversation stays with one replica while that one serves (`routing.py`). If a replica is lost, what it had is issued
again elsewhere with the same seeds, and answers of its old life are refused. It comes back by itself, gets the current
weights, proves that it has them, and serves again. The pool ends only when no replica is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from headrace.engines.base import EngineHealth, Generation, RolloutEngine, SamplingParams
from headrace.engines.replica import Replica
from headrace.engines.routing import choose
from headrace.errors import EngineError, PromptTooLongError, ServerLostError, WeightSyncError
from headrace.weights.base import Endpoint, Reachable
from headrace.weights.sync import Recovers

_log = logging.getLogger("headrace")
_POLL_S = 0.02
T = TypeVar("T")
Restore = Callable[[Any], Awaitable[bool]]


class EnginePool:
    """Made on any thread; from its first call on it belongs to the event loop of that call.

    `pins_one`: the replicas have one version at a time, so a pin keeps one of them out of weight syncs. `release` is
    called when all are closed.
    """

    routes: Literal[True] = True

    def __init__(
        self, engines: Sequence[RolloutEngine], pins_one: bool = False, release: Callable[[], None] = lambda: None
    ) -> None:
        self.replicas = [Replica(number, engine) for number, engine in enumerate(engines)]
        self._pins_one = pins_one
        self._release = release
        self._pinned_version: int | None = None
        self._pinners: list[Replica] = []  # those that were asked to keep it
        self._in_pin = 0
        self._paused = False
        self._steering = asyncio.Lock()  # one at a time pauses or resumes
        self._opened = False
        self._updating: list[Replica] = []
        self._restore: Restore | None = None
        self._restarts = self._reissued = 0
        self._version = self._begun = 0  # of the last weight sync, and of the last that was begun
        self._catching_up: set[asyncio.Task[None]] = set()
        self._closed = False

    # ---- sampling -------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False,
        affinity: str | None = None,
    ) -> Generation:  # fmt: skip
        version = self._pinned_version if pinned else None
        self._in_pin += pinned
        try:
            while True:
                made = await self._issued(
                    lambda engine: engine.generate(prompt_ids, params, seed, pinned), affinity, version
                )
                if version is None or {*made.versions} <= {version} or version != self._pinned_version:
                    return made
                self._reissued += 1  # its server was lost, and came back with newer weights
        finally:
            self._in_pin -= pinned

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._issued(lambda engine: engine.compute_logprobs(rows))

    async def _issued(
        self, call: Callable[[RolloutEngine], Awaitable[T]], affinity: str | None = None, version: int | None = None
    ) -> T:
        """Issue a request until a replica that still counts has answered it; one that keeps the pinned `version`."""
        while True:
            replica = await self._chosen(affinity, version)
            life, replica.in_flight = replica.life, replica.in_flight + 1
            try:
                answer = await call(replica.engine)
                if replica.life == life:
                    return answer
                # of a life that has ended since: nobody vouches for what it was sampled with
            except PromptTooLongError:
                raise
            except EngineError as error:
                if not self._note_loss(replica, life, error) and version in (None, replica.engine.health().pinned):
                    raise
            finally:
                replica.in_flight -= 1
            self._reissued += 1
            await asyncio.sleep(_POLL_S)

    async def _chosen(self, affinity: str | None, version: int | None) -> Replica:
        """A replica that serves; waits for one if all are being started."""
        while True:
            self._check_usable()
            back = self._kept_back
            if version is not None and version == self._pinned_version:
                found = [one for one in await self._keepers(version) if one.serves]
            else:
                found = [one for one in self.replicas if one.serves and one is not back]
            found = [one for one in found if one is back or not self._is_behind(one)]
            if found:
                number = choose(affinity, [one.number for one in found], lambda n: self.replicas[n].in_flight)
                return self.replicas[number]
            self._note_ends()
            await asyncio.sleep(_POLL_S)

    def _is_behind(self, replica: Replica) -> bool:
        """Whether it has come back by itself, and has missed what the others were asked; it catches up."""
        old = self._restore is not None and replica.engine.health().version < self._version
        if not (old or replica.missed):
            return False
        replica.stale = True
        task = asyncio.create_task(self._catch_up(replica), name="headrace-pool-catch-up")
        self._catching_up.add(task)
        task.add_done_callback(self._catching_up.discard)
        return True

    async def _catch_up(self, replica: Replica) -> None:
        """If the learner has moved on, or it is lost once more, the next weight sync brings it the newest."""
        life, engine = replica.life, replica.engine
        replica.missed = False
        try:
            if self._restore is None or engine.health().version >= self._version:
                await self._align(engine)
                replica.stale = False
            else:
                replica.stale = not await self._restored(engine)
        except WeightSyncError as error:
            self._replace(replica, error)
        except EngineError as error:
            if not self._note_loss(replica, life, error):
                raise

    # ---- loss -----------------------------------------------------------------------------------------------------

    def _note_loss(self, replica: Replica, life: int, error: EngineError) -> bool:
        """Whether the error means that the replica is lost, and others may do what was asked of it."""
        stopped = replica.engine.health().error
        if not isinstance(error, ServerLostError) and stopped is None:
            return False
        if replica.life == life:
            replica.life += 1
            _log.warning("replica %d is lost: %s; its requests are issued again", replica.number, error)
        if stopped is not None and replica.gone is None:
            replica.gone = error
            left = sum(one.gone is None for one in self.replicas)
            _log.warning("replica %d does not come back: %s; %d replicas are left", replica.number, stopped, left)
        self._check_usable()
        return True

    def _note_ends(self) -> None:
        """Nobody asks a replica that is being started, so nobody hears that it could not be."""
        for one in self.replicas:
            why = one.engine.health().error
            if one.gone is None and why is not None:
                one.gone = EngineError(why)
                _log.warning("replica %d does not come back: %s", one.number, why)

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if all(one.gone is not None for one in self.replicas):
            last = self.replicas[-1].gone
            raise EngineError(f"no replica is left of {len(self.replicas)}; the last error: {last}") from last

    async def recovered(self) -> None:
        """Return when there is a replica to talk to that is not kept back."""
        while not any(one.reachable and one is not self._kept_back for one in self.replicas):
            self._note_ends()
            self._check_usable()
            self._require(1 + (self._kept_back is not None))
            await asyncio.sleep(_POLL_S)

    def when_restarted(self, restore: Restore) -> None:
        """Who brings the current weights to a replica that was started again without them."""
        self._restore = restore
        for replica in self.replicas:
            if isinstance(replica.engine, Recovers):
                replica.engine.when_restarted(self._restored)

    async def _restored(self, engine: RolloutEngine) -> bool:
        """Bring the current weights to one replica, and make it do what the others do."""
        assert self._restore is not None
        if not await self._restore(engine):
            return False
        await self._align(engine)
        next(one for one in self.replicas if one.engine is engine).stale = False  # it may have been lost meanwhile
        return True

    async def _align(self, engine: RolloutEngine) -> None:
        async with self._steering:  # or a pause of all could overtake the resumption of one
            if engine.health().paused != self._paused:
                await (engine.pause() if self._paused else engine.resume())

    async def _all(
        self, call: Callable[[RolloutEngine], Awaitable[T]], among: Sequence[Replica] | None = None, least: int = 1
    ) -> list[tuple[Replica, T]]:
        """What every replica answers; one that is lost meanwhile is left out."""
        self._check_usable()
        asked = among if among is not None else self._reachable()

        async def one(replica: Replica) -> tuple[Replica, T] | None:
            life = replica.life
            try:
                return replica, await call(replica.engine)
            except EngineError as error:
                if not self._note_loss(replica, life, error):
                    raise
                return None

        found = [answer for answer in await asyncio.gather(*map(one, asked)) if answer is not None]
        if len(found) < least:
            raise ServerLostError("every replica was lost; they are started again")
        return found

    def _reachable(self) -> list[Replica]:
        """Those that are there. At the beginning all of them: a server starts with its first call."""
        opened, self._opened = self._opened, True
        return [one for one in self.replicas if one.reachable or (not opened and one.gone is None)]

    # ---- weights --------------------------------------------------------------------------------------------------

    def endpoints(self) -> list[Endpoint]:
        found = [one.engine for one in self._updating or self.replicas]
        return [endpoint for engine in found if isinstance(engine, Reachable) for endpoint in engine.endpoints()]

    def synced(self) -> list[RolloutEngine]:
        """The replicas that took part in the update; each of them has to prove what it decodes with."""
        return [one.engine for one in self._updating]

    def distrust(self, engine: RolloutEngine, why: WeightSyncError | ServerLostError) -> None:
        """A replica that does not decode with the weights that were sent is lost, and replaced."""
        for replica in self._updating:
            if replica.engine is engine:
                self._replace(replica, why)
        self._updating = [one for one in self._updating if one.engine is not engine]

    def _replace(self, replica: Replica, why: WeightSyncError | ServerLostError) -> None:
        replace = getattr(replica.engine, "replace_server", None)
        if replace is None:
            raise why
        replica.life += 1
        _log.warning("replica %d failed its weight sync and is started again: %s", replica.number, why)
        replace()

    async def pause(self) -> None:
        async with self._steering:
            self._paused = True
            self._note_missing()
            await self._all(lambda engine: engine.pause(), least=0)

    async def resume(self) -> None:
        async with self._steering:
            self._paused = False
            self._note_missing()
            await self._all(lambda engine: engine.resume(), least=0)

    def _note_missing(self) -> None:
        for one in self.replicas:
            one.missed |= self._opened and not one.reachable

    async def begin_update(self, version: int) -> None:
        if self._pinned_version is not None and self._begun <= self._pinned_version:
            await self._keepers(self._pinned_version)  # or no replica would keep it back from this update
        self._begun = version
        back = self._kept_back
        taking = [one for one in self._reachable() if one is not back]
        self._updating = [one for one, _ in await self._all(lambda engine: engine.begin_update(version), taking)]

    async def end_update(self, version: int) -> str | None:
        if not self._updating:
            raise EngineError("end_update came before begin_update; begin an update, send the weights, then end it")
        ended = await self._all(lambda engine: engine.end_update(version), self._updating)
        self._updating = [one for one, _ in ended]
        for one in self._updating:
            one.stale = False
        self._version = version
        digests = {digest for _, digest in ended}
        if len(digests) > 1:
            found = ", ".join(f"{one.number}: {digest}" for one, digest in ended)
            raise WeightSyncError(
                f"version {version} arrived differently at different replicas ({found}); resume from the last "
                f"checkpoint, and report it if it happens again"
            )
        return digests.pop()

    async def pin(self) -> int:
        if self._pinned_version is not None:
            raise EngineError(f"version {self._pinned_version} is pinned already; call unpin before pinning another")
        serving = await self._newest(2 if self._pins_one else 1)
        if self._pins_one:
            serving = [min(serving, key=lambda one: (one.in_flight, -one.number))]
        pinned = await self._all(lambda engine: engine.pin(), serving)
        self._pinners = [one for one, _ in pinned]
        self._pinned_version = max(version for _, version in pinned)
        return self._pinned_version

    async def _newest(self, count: int) -> list[Replica]:
        """Those that serve the newest weights; waits until there are so many."""
        while True:
            self._check_usable()
            self._require(count)
            newest = self.health().version
            serving = [one for one in self.replicas if one.serves and one.engine.health().version == newest]
            if len(serving) >= count:
                return serving
            await asyncio.sleep(_POLL_S)

    def _require(self, count: int) -> None:
        left = sum(one.gone is None for one in self.replicas)
        if left < count:
            raise EngineError(
                f"{left} of {len(self.replicas)} replicas are left, and evaluation beside training needs one for "
                f"itself; raise engine.replicas"
            )

    @property
    def _kept_back(self) -> Replica | None:
        """The one that has only the pinned version."""
        return next(iter(self._that_keep(self._pinned_version)), None) if self._pins_one else None

    def _that_keep(self, version: int | None) -> list[Replica]:
        """Those that still have a pinned version; a server that was started again has it no more."""
        if version is None:
            return []
        return [one for one in self._pinners if one.gone is None and one.engine.health().pinned == version]

    async def _keepers(self, version: int) -> list[Replica]:
        """The same, and if all were lost another one, as long as the version is the newest."""
        if found := self._that_keep(version):
            return found
        if self._begun > version:
            raise EngineError(
                f"the replica, which alone had the pinned version {version}, is lost, and the evaluation with it; "
                f"resume the run"
            )
        serving = [one for one in self.replicas if one.serves and one.engine.health().version == version]
        for one in sorted(serving, key=lambda one: one.in_flight)[:1]:
            await one.engine.pin()
            self._pinners = [*(other for other in self._pinners if other is not one), one]
        return self._that_keep(version)

    async def unpin(self) -> None:
        if self._pinned_version is None:
            raise EngineError("nothing is pinned; call pin before unpin")
        while self._pins_one and self._in_pin:  # noqa: ASYNC110  (requests end by themselves)
            await asyncio.sleep(_POLL_S)
        if back := self._kept_back:
            back.stale = self._restore is not None and back.engine.health().version < self._version
        asked, self._pinners, self._pinned_version = self._pinners, [], None
        await self._all(lambda engine: engine.unpin(), asked, least=0)
        if back is not None and back.stale:
            await self._catch_up(back)

    async def release_cache(self) -> None:
        await self._all(lambda engine: engine.release_cache(), least=0)

    async def restart(self) -> None:
        await self._all(lambda engine: engine.restart())
        self._restarts += 1

    # ---- bookkeeping ----------------------------------------------------------------------------------------------

    def health(self) -> EngineHealth:
        found, back = [one.engine.health() for one in self.replicas], self._kept_back
        left = [health for one, health in zip(self.replicas, found, strict=True) if one.gone is None]
        serving = [
            health for one, health in zip(self.replicas, found, strict=True)
            if one.serves and one is not back
        ] or left or found  # fmt: skip
        errors = [health.error for health in found if health.error is not None]
        return EngineHealth(
            alive=not self._closed and any(health.alive for health in found),
            paused=self._paused,
            version=max(health.version for health in serving),
            running=sum(health.running for health in found),
            waiting=sum(health.waiting for health in found),
            generated_tokens=sum(health.generated_tokens for health in found),
            busy_s=sum(health.busy_s for health in found) / len(found),
            error=f"no replica is left: {errors[-1]}" if len(errors) == len(found) else None,
            # those that were asked for are one restart of the pool
            restarts=sum(health.restarts for health in found) - self._restarts * (len(found) - 1),
            state="serving" if any(health.state == "serving" for health in left) else "starting",
            reissued=self._reissued + sum(health.reissued for health in found),
            replicas=tuple(found),
            pinned=self._pinned_version,
        )

    async def close(self) -> None:
        self._closed = True
        for task in self._catching_up:
            task.cancel()
        await asyncio.gather(*(one.engine.close() for one in self.replicas), return_exceptions=True)
        await asyncio.to_thread(self._release)
