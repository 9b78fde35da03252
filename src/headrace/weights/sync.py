"""WeightSync: brings the learner's weights to the engine, and proves that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from headrace.errors import ServerLostError, WeightSyncError
from headrace.weights.base import Reachable, SyncedWeights, WeightSender, WeightSource
from headrace.weights.canary import Canary, CanaryCheck


class Health(Protocol):
    """What a sync reads of an engine's health."""

    @property
    def paused(self) -> bool: ...
    @property
    def version(self) -> int: ...


class Updatable(Protocol):
    """What a sync needs of an engine; every `RolloutEngine` has it."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def begin_update(self, version: int) -> None: ...
    async def end_update(self, version: int) -> str | None: ...
    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]: ...
    def health(self) -> Health: ...


@runtime_checkable
class Recovers(Protocol):
    """What an engine of servers has beside: a server that is lost comes back, without the weights."""

    async def recovered(self) -> None:
        """Return when there is a server to talk to again."""
        ...

    def when_restarted(self, restore: Callable[[Any], Awaitable[bool]]) -> None:
        """Who brings the current weights to an engine, or to one replica, whose server was started again."""
        ...


@runtime_checkable
class SendsToSome(Protocol):
    """What a sender to several servers has beside."""

    async def send_to(self, engine: Any, version: int) -> str | None:
        """Send to the endpoints of one replica only."""
        ...


@runtime_checkable
class Replicated(Protocol):
    """What a pool has beside: each replica proves for itself what it decodes with."""

    def synced(self) -> Sequence[Updatable]:
        """The replicas that took part in the update."""
        ...

    def distrust(self, engine: Any, why: WeightSyncError | ServerLostError) -> None:
        """Replace one that does not decode with the weights that were sent."""
        ...


_ATTEMPTS = 4


class WeightSync:
    """Drives one sync after the other, from one source to one engine.

    Two proofs: the digest of what the engine decodes with, where the engine can take it; and `canary` rows, which
    both sides score, where it cannot. `pauses`: the engine must not decode while weights travel.
    """

    def __init__(
        self,
        source: WeightSource,
        sender: WeightSender,
        engine: Updatable,
        canary: Canary | None = None,
        pauses: bool = False,
    ) -> None:
        self._source = source
        self._sender = sender
        self._engine = engine
        self._canary = CanaryCheck(canary) if canary is not None else None
        self._pauses = pauses
        self._busy = asyncio.Lock()
        self._owes_resume = False
        if isinstance(engine, Recovers):
            engine.when_restarted(self.restore)
        self._last: SyncedWeights | None = None
        self.canary_difference: float | None = None
        """Of the last sync: the mean difference between the two sides' log-probabilities of the canary rows."""

    @property
    def in_place(self) -> bool:
        """Whether the engine decodes with the learner's own tensors: it must be paused before they change."""
        return self._sender.in_place

    async def sync(self, version: int) -> SyncedWeights:
        """Make the engine decode with the learner's weights as `version`; WeightSyncError if it decodes with others.

        Pause, begin_update, send, end_update, proof, resume. Only some transports need the pause. A caller that
        paused the engine before it changed the weights also resumes it.
        """
        async with self._busy:
            # as it is before the first attempt, which may leave it paused; so may a restoration that was overtaken
            pauses, self._owes_resume = self._pauses_for(self._engine) or self._owes_resume, False
            for attempt in range(_ATTEMPTS):
                try:
                    self._last = SyncedWeights(version, await self._bring(self._engine, version, pauses))
                    return self._last
                except ServerLostError:
                    if attempt == _ATTEMPTS - 1 or not isinstance(self._engine, Recovers):
                        raise
                    await self._engine.recovered()
                except WeightSyncError as error:
                    if attempt == _ATTEMPTS - 1 or not self._leaves_out(error):
                        raise
        raise AssertionError("there is a last attempt")

    async def resume(self) -> None:
        """Resume an engine that its caller has paused: not while a server that came back is being restored."""
        async with self._busy:
            await self._engine.resume()

    async def restore(self, engine: Updatable) -> bool:
        """Bring the weights of the last sync to an engine, or to one replica of it, whose server was started again.

        False if the learner has moved on, so that the next sync will bring newer ones.
        """
        async with self._busy:
            last = self._last
            if last is None or await self._source.digest() != last.digest:
                return False
            pauses = self._pauses_for(engine)
            if await self._bring(engine, last.version, pauses, expected=last.digest) != last.digest:
                self._owes_resume = pauses  # a step was made meanwhile: what was brought has no version yet
                return False
        return True

    def _leaves_out(self, error: WeightSyncError) -> bool:
        """Whether the replica that a transfer failed at is replaced, because there are others to sync."""
        if not isinstance(self._engine, Replicated):
            return False
        taking = self._engine.synced()
        failed = [one for one in taking if isinstance(one, Reachable) and error.url in {e.url for e in one.endpoints()}]
        if not 0 < len(failed) < len(taking):
            return False
        for one in failed:
            self._engine.distrust(one, error)
        return True

    def _pauses_for(self, engine: Updatable) -> bool:
        return (self.in_place or self._pauses) and not engine.health().paused

    async def _bring(self, engine: Updatable, version: int, pauses: bool, expected: str | None = None) -> str:
        """The learner's weights as they are now, to one engine; their digest, once it is proved.

        If they are not those that were `expected`, the engine stays paused.
        """
        if pauses:
            await engine.pause()
        await engine.begin_update(version)
        if expected is None:
            # the learner reads its weights while they travel: a proof takes as long as a copy
            ours, (arrived, theirs) = await asyncio.gather(self._source.digest(), self._send(engine, version))
        else:  # the learner may make a step at any moment: the weights that it has after sending are those that it sent
            arrived, theirs = await self._send(engine, version)
            ours = await self._source.digest()
            if ours != expected:
                return ours
        self._prove(version, engine.health().version, ours, theirs)
        if self._canary is not None:
            scores = await self._canary.learner_scores(None if expected is None else version)
            self.canary_difference = await self._prove_by_rows(scores, engine, version, arrived is not None)
        if pauses:  # after the proof: no token is sampled with weights that are not the learner's
            await engine.resume()
        return ours

    async def _prove_by_rows(self, scores: list[float], engine: Updatable, version: int, arrived: bool) -> float:
        """The largest difference. A replica that fails is replaced, as long as there is one that does not."""
        canary, found = self._canary, list[float]()
        assert canary is not None
        failed: list[tuple[Updatable, WeightSyncError | ServerLostError]] = []
        for one in engine.synced() if isinstance(engine, Replicated) else (engine,):
            try:
                found.append(await canary.prove(version, scores, one.compute_logprobs, arrived))
            except (WeightSyncError, ServerLostError) as error:
                failed.append((one, error))
        if not found:
            raise failed[0][1]
        for one, error in failed:
            assert isinstance(engine, Replicated)
            engine.distrust(one, error)
        return max(found)

    async def _send(self, engine: Updatable, version: int) -> tuple[str | None, str | None]:
        if engine is not self._engine and isinstance(self._sender, SendsToSome):
            arrived = await self._sender.send_to(engine, version)
        else:
            arrived = await self._sender.send(version)
        return arrived, await engine.end_update(version)

    def _prove(self, version: int, served: int, ours: str, theirs: str | None) -> None:
        last = self._last
        if served != version and theirs in (None, ours):
            found = f"the engine says that it serves version {served}"
        elif theirs in (None, ours):
            return
        elif last is not None and theirs == last.digest:
            found = f"the engine still decodes with the weights of version {last.version}, digest {theirs}"
        else:
            found = f"the engine decodes with weights of the digest {theirs}: some are missing or changed"
        raise WeightSyncError(
            f"version {version} did not arrive: the learner's weights have the digest {ours}, and {found}; resume "
            f"from the last checkpoint, and report it if it happens again"
        )
