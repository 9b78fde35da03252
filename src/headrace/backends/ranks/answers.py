"""What the answers of all ranks to one call come to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.backends.ranks.base import RanksLostError
from headrace.backends.ranks.wire import Answer

_log = logging.getLogger("headrace")
GRACE_S = 10.0
"""For the others to fail, too, once a rank has failed."""
START_S = 600.0
"""For a rank to import what it needs."""


def values(method: str, size: int, answers: Mapping[int, Answer]) -> dict[int, Any]:
    """What every rank returned. An error of ours that they raised; RanksLostError for any other: what state it has
    left the rank in, nobody knows."""
    for rank, found in sorted(answers.items()):
        if found.foreign:
            _log.error("rank %d: %s failed:\n%s", rank, method, found.foreign)
            raise RanksLostError(f"{method} failed on rank {rank} of {size}: {found.foreign.splitlines()[0]}")
    for _, found in sorted(answers.items()):
        if found.error is not None:
            raise found.error
    return {rank: found.value for rank, found in answers.items()}


def silence(
    method: str, size: int, answers: Mapping[int, Answer], timeout_s: float, stuck: Sequence[int] = ()
) -> Exception:
    """Why some ranks do not answer: others have failed, and they wait for them; or they hang.

    `stuck` are those that are known to: by default, all without an answer.
    """
    failed = next((one for one in answers.values() if one.error or one.foreign), None)
    if failed is None:
        missing = list(stuck) or [rank for rank in range(size) if rank not in answers]
        which = "no rank answered" if len(missing) == size else f"rank {', '.join(map(str, missing))} did not answer"
        return RanksLostError(
            f"{which} in {method} for {timeout_s:g} s, and all were ended; their stacks are in the log: look for the "
            f"one that is elsewhere than the others. If a pass takes that long, raise backend.rank_timeout_s"
        )
    if failed.error is not None:  # it would come again
        return failed.error
    first = failed.foreign.splitlines()[0]
    return RanksLostError(f"{method} failed on some of {size} ranks, and the others waited for them: {first}")
