"""WeightSync: brings the learner's weights to the engine, and proves that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import WeightSyncError
from headrace.weights.base import SyncedWeights, WeightSender, WeightSource
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
        pauses = (self.in_place or self._pauses) and not self._engine.health().paused
        if pauses:
            await self._engine.pause()
        await self._engine.begin_update(version)
        # the learner reads its weights while they travel: a proof takes as long as a copy
        ours, (arrived, theirs) = await asyncio.gather(self._source.fingerprint(), self._send(version))
        self._prove(version, ours, theirs)
        if self._canary is not None:
            scores = await self._canary.learner_scores()
            self.canary_difference = await self._canary.prove(
                version, scores, self._engine.compute_logprobs, arrived is not None
            )
        if pauses:  # after the proof: no token is sampled with weights that are not the learner's
            await self._engine.resume()
        self._last = SyncedWeights(version, ours)
        return self._last

    async def _send(self, version: int) -> tuple[str | None, str | None]:
        return await self._sender.send(version), await self._engine.end_update(version)

    def _prove(self, version: int, ours: str, theirs: str | None) -> None:
        served, last = self._engine.health().version, self._last
        if served != version and theirs in (None, ours):
            found = f"the engine says that it serves version {served}"
        elif theirs in (None, ours):
            return
        elif last is not None and theirs == last.fingerprint:
            found = f"the engine still decodes with the weights of version {last.version}, fingerprint {theirs}"
        else:
            found = f"the engine decodes with weights of the fingerprint {theirs}: some are missing or changed"
        raise WeightSyncError(
            f"version {version} did not arrive: the learner's weights have the fingerprint {ours}, and {found}; resume "
            f"from the last checkpoint, and report it if it happens again"
        )
