"""The tensors that receivers are to expect, and what they report, compared with what was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from headrace.errors import WeightSyncError

_NAMED = 3


def compare_receipts(names: Sequence[str], sent: Sequence[int], arrived: Sequence[int], url: str) -> str:
    """A digest of it all; WeightSyncError with the names of tensors that are missing or changed."""
    differ = [name for name, ours, theirs in zip(names, sent, arrived, strict=True) if ours != theirs]
    if differ:
        shown = ", ".join(differ[:_NAMED]) + (f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else "")
        raise WeightSyncError(
            f"{len(differ)} of {len(names)} tensors did not arrive at {url} as they were sent: {shown}; resume from "
            f"the last checkpoint, and report it if it happens again",
            url,
        )
    return hashlib.blake2b(repr((list(names), list(sent))).encode(), digest_size=8).hexdigest()
