"""The machines of a simulated run: which engine runs what, which nodes are lost when, how long a weight sync takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from headrace.config import FleetSection

_CHUNKS = 32  # a tree passes weights on in pieces, so that its levels overlap
_BITS = 8


def sync_seconds(fleet: FleetSection) -> float:
    """One weight sync to all engines.

    direct: one sender, whose network carries every copy. tree: every node sends to two others and passes pieces on
    while the next arrive. file: written once, then read by all at once.
    """
    gigabits = fleet.weights_gb * fleet.sent_share * _BITS
    once_s = gigabits / fleet.bandwidth_gbps
    if fleet.transport == "direct":
        return once_s * fleet.engines
    if fleet.transport == "tree":
        depth = math.ceil(math.log2(fleet.engines + 1))
        return 2 * once_s * (1 + (depth - 1) / _CHUNKS)
    return once_s + max(once_s, gigabits * fleet.engines / fleet.storage_gbps)


class Fleet:
    """Engines with slots, and the moments at which nodes are lost."""

    def __init__(self, section: FleetSection, slots: int, rng: random.Random) -> None:
        """`slots` are those of all engines together: as even a share as there is for each."""
        self._section = section
        self._rng = rng
        share, rest = divmod(slots, section.engines)
        self._slots = [share + (index < rest) for index in range(section.engines)]
        self._running: list[set[int]] = [set() for _ in range(section.engines)]
        self._up = [True] * section.engines
        self._free = [index for index in reversed(range(section.engines)) if self._slots[index]]
        """Engines with a free slot, perhaps; looked at from the end."""

    def take(self, group_id: int) -> int | None:
        """The engine that begins to run a group; None if all slots are taken."""
        while self._free:
            index = self._free[-1]
            if self._up[index] and len(self._running[index]) < self._slots[index]:
                self._running[index].add(group_id)
                return index
            self._free.pop()
        return None

    def release(self, index: int, group_id: int) -> None:
        """The group is complete."""
        self._running[index].discard(group_id)
        if self._up[index]:
            self._free.append(index)

    def lose(self, index: int) -> list[int]:
        """An engine is lost; the groups that it ran, in their order."""
        self._up[index] = False
        lost, self._running[index] = sorted(self._running[index]), set()
        return lost

    def replace(self, index: int) -> None:
        """It is back."""
        self._up[index] = True
        if self._slots[index]:
            self._free.append(index)

    def is_up(self, index: int) -> bool:
        return self._up[index]

    def losses(self) -> Iterator[tuple[float, int]]:
        """Seconds until the next node is lost, and which: engines first, then learners. For ever."""
        section = self._section
        nodes = section.engines + section.learners
        if not section.mtbf_h:
            return
        while True:
            yield self._rng.expovariate(nodes / (section.mtbf_h * 3600)), self._rng.randrange(nodes)
