"""What training made of an episode's tokens, put under the tokens of its Steps."""

from __future__ import annotations

from typing import Any

from headrace.ledger.reader import LedgerReader

TokenColumns = dict[str, list[Any]]
"""Values by column, one per token of a reply, None where there is none."""


def learned_columns(
    reader: LedgerReader, group_id: int, rollout_idx: int, attempt: int
) -> dict[tuple[int, int], TokenColumns]:
    """By the numbers of trajectory and Step. Empty if nothing was trained, or nothing is on record."""
    return {}
