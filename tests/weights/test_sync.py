"""WeightSync: the order of a sync, and the faults that must not pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from headrace.errors import EngineError, WeightSyncError
from headrace.weights.base import SyncedWeights
from headrace.weights.sync import WeightSync


@dataclass
class Served:
    """What an engine says of itself."""

    paused: bool = False
    version: int = 0


@dataclass
class Ends:
    """Learner, transport and engine in one: weights are a word, and every call is noted."""

    in_place: bool = False
    learner: str = "first"
    sent: str = ""
    decoded: str = "loaded"
    served: Served = field(default_factory=Served)
    calls: list[str] = field(default_factory=list)

    def health(self) -> Served:
        return self.served

    async def digest(self) -> str:
        self.calls.append("digest")
        return self.learner

    async def pause(self) -> None:
        self.calls.append("pause")
        self.served.paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        self.served.paused = False

    async def begin_update(self, version: int) -> None:
        self.calls.append(f"begin {version}")

    async def send(self, version: int) -> None:
        self.calls.append(f"send {version}")
        self.sent = self.learner

    async def end_update(self, version: int) -> str:
        self.calls.append(f"end {version}")
        self.decoded, self.served.version = self.sent, version
        return self.decoded

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        raise AssertionError("who has a digest needs no canary")

    def sync(self, version: int) -> SyncedWeights:
        if not hasattr(self, "_sync"):
            self._sync = WeightSync(self, self, self)
        return asyncio.run(self._sync.sync(version))


def test_weights_that_travel_are_synced_without_a_pause() -> None:
    ends = Ends()
    assert ends.sync(1) == SyncedWeights(1, "first")
    assert ends.calls == ["begin 1", "digest", "send 1", "end 1"]
    assert ends.decoded == "first" and ends.served.version == 1


def test_weights_in_place_are_synced_while_the_engine_is_paused() -> None:
    ends = Ends(in_place=True)
    ends.sync(1)
    assert ends.calls == ["pause", "begin 1", "digest", "send 1", "end 1", "resume"]


def test_who_paused_the_engine_resumes_it() -> None:
    ends = Ends(in_place=True, served=Served(paused=True))
    ends.sync(1)
    assert ends.calls == ["begin 1", "digest", "send 1", "end 1"] and ends.served.paused


def test_the_learner_reads_its_weights_while_they_travel() -> None:
    meanwhile = asyncio.Event()

    class Slow(Ends):
        async def digest(self) -> str:
            await asyncio.wait_for(meanwhile.wait(), 5)
            return self.learner

        async def send(self, version: int) -> None:
            await super().send(version)
            meanwhile.set()

    assert Slow().sync(1).digest == "first"


class SendsNothing(Ends):
    async def send(self, version: int) -> None: ...


class Drops(Ends):
    async def send(self, version: int) -> None:
        self.sent = self.learner[:-1]


class KeepsVersion(Ends):
    async def end_update(self, version: int) -> str:
        return await super().end_update(version - 1)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (SendsNothing, "the engine still decodes with the weights of version 1, digest first"),
        (Drops, "decodes with weights of the digest secon: some are missing or changed"),
        (KeepsVersion, "the engine says that it serves version 1"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_fault_on_the_way_is_an_error_that_says_what_the_engine_decodes_with(
    fault: type[Ends], says: str, in_place: bool
) -> None:
    ends = Ends(in_place=in_place)
    ends.sync(1)
    ends.__class__, ends.learner = fault, "second"
    with pytest.raises(WeightSyncError) as raised:
        ends.sync(2)
    text = str(raised.value)
    assert text.startswith("version 2 did not arrive: the learner's weights have the digest second, and ")
    assert says in text and "resume from the last checkpoint" in text
    assert ends.served.paused == in_place  # what is wrong is not decoded with


def test_a_transport_that_fails_ends_the_sync() -> None:
    class Breaks(Ends):
        async def send(self, version: int) -> None:
            raise EngineError("the line is cut")

    with pytest.raises(EngineError, match="the line is cut"):
        Breaks().sync(1)
