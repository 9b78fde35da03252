"""Which replica a request goes to: that of its conversation, unless it has much more to do than another.

Rendezvous hashing: every replica has a weight for every conversation, and the heaviest one serves it. A conversation
keeps its replica, whose cache has its beginning; if a replica is lost, only its own conversations move, and they move
back when it serves again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

SPILL_REQUESTS = 4
SPILL_RATIO = 1.5


def weight(affinity: str, replica: int) -> int:
    """The same in every process and on every machine."""
    return int.from_bytes(blake2b(f"{replica}\0{affinity}".encode(), digest_size=8).digest(), "big")


def preferred(affinity: str, replicas: Iterable[int]) -> list[int]:
    """The replicas in the order in which they serve a conversation."""
    return sorted(replicas, key=lambda replica: (-weight(affinity, replica), replica))


def is_overloaded(load: int, least: int) -> bool:
    """Whether a replica has so much to do that a cache is not worth the wait."""
    return load >= least + SPILL_REQUESTS and load > SPILL_RATIO * least


def choose(affinity: str | None, replicas: Sequence[int], load: Callable[[int], int]) -> int:
    """The replica for a request: its conversation's first that is not overloaded, or the one with the least to do."""
    loads = {replica: load(replica) for replica in replicas}
    least = min(loads.values())
    if affinity is None:
        return min(replicas, key=lambda replica: (loads[replica], replica))
    return next(one for one in preferred(affinity, replicas) if not is_overloaded(loads[one], least))
