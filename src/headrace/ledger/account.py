"""The account of episodes: promise number two, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """Where every dispatched episode is. dispatched = trained + filtered + failed + stale + pending, always."""

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    stale: int = 0
    pending: int = 0
