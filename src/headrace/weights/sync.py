"""WeightSync: brings the learner's weights to the engine, and proves that they arrived."""

from __future__ import annotations

import asyncio
from typing import Protocol

from headrace.errors import WeightSyncError
from headrace.weights.base import SyncedWeights, WeightSender, WeightSource


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
    async def end_update(self, version: int) -> str: ...
    def health(self) -> Health: ...


class WeightSync:
    """Drives one sync after the other, from one source to one engine."""

    def __init__(self, source: WeightSource, sender: WeightSender, engine: Updatable) -> None:
        self._source = source
        self._sender = sender
        self._engine = engine
        self._last: SyncedWeights | None = None

    @property
    def in_place(self) -> bool:
        """Whether the engine decodes with the learner's own tensors: it must be paused before they change."""
        return self._sender.in_place

    async def sync(self, version: int) -> SyncedWeights:
        """Make the engine decode with the learner's weights as `version`; WeightSyncError if it decodes with others.

        Pause, begin_update, send, end_update, proof, resume. Only weights in place need the pause. A caller that
        paused the engine before it changed the weights also resumes it.
        """
        pauses = self.in_place and not self._engine.health().paused
        if pauses:
            await self._engine.pause()
        await self._engine.begin_update(version)
        # the learner reads its weights while they travel: a proof takes as long as a copy
        ours, theirs = await asyncio.gather(self._source.fingerprint(), self._send(version))
        self._prove(version, ours, theirs)
        if pauses:  # after the proof: no token is sampled with weights that are not the learner's
            await self._engine.resume()
        self._last = SyncedWeights(version, ours)
        return self._last

    async def _send(self, version: int) -> str:
        await self._sender.send(version)
        return await self._engine.end_update(version)

    def _prove(self, version: int, ours: str, theirs: str) -> None:
        served, last = self._engine.health().version, self._last
        if theirs != ours and last is not None and theirs == last.fingerprint:
            found = f"the engine still decodes with the weights of version {last.version}, fingerprint {theirs}"
        elif theirs != ours:
            found = f"the engine decodes with weights of the fingerprint {theirs}: some are missing or changed"
        elif served != version:
            found = f"the engine says that it serves version {served}"
        else:
            return
        raise WeightSyncError(
            f"version {version} did not arrive: the learner's weights have the fingerprint {ours}, and {found}; resume "
            f"from the last checkpoint, and report it if it happens again"
        )
