"""SyncCoordinator: versions, admission and the account of episodes. Pure logic: no clock, no I/O, no async."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """Where every dispatched episode is. dispatched = trained + filtered + failed + stale + pending, always."""

    dispatched: int
    trained: int
    filtered: int
    failed: int
    stale: int
    pending: int


class SyncCoordinator:
    """Decides when work may start. A batch may be opened for every version up to `version + max_staleness`.

    Because batch k is trained to make version k + 1, no token of it is then older than `max_staleness` versions.
    """

    def __init__(self, max_staleness: int = 0, version: int = 0) -> None:
        self.max_staleness = max_staleness
        self.version = version
        self._batches_opened = version
        self._dispatched = self._trained = self._filtered = self._failed = self._stale = self._pending = 0

    def may_open_batch(self) -> bool:
        """Whether rollouts of one more batch may start."""
        return self._batches_opened <= self.version + self.max_staleness

    def open_batch(self) -> None:
        """Rollouts of one more batch start."""
        assert self.may_open_batch(), "a batch was opened beyond the staleness bound"
        self._batches_opened += 1

    def skipped(self) -> None:
        """An opened batch came to no update, so another may be opened for the same version."""
        self._batches_opened -= 1

    def dispatched(self, episodes: int) -> None:
        """Episodes were started."""
        self._dispatched += episodes
        self._pending += episodes

    def settled(self, *, trained: int = 0, filtered: int = 0, failed: int = 0, stale: int = 0) -> None:
        """Pending episodes found their end."""
        self._pending -= trained + filtered + failed + stale
        assert self._pending >= 0, "an episode was settled twice"
        self._trained += trained
        self._filtered += filtered
        self._failed += failed
        self._stale += stale

    def published(self, version: int) -> None:
        """The engine has the weights of `version`."""
        assert version == self.version + 1, f"version {version} was published after {self.version}"
        self.version = version

    def account(self) -> Account:
        """The conservation count."""
        account = Account(self._dispatched, self._trained, self._filtered, self._failed, self._stale, self._pending)
        settled = account.trained + account.filtered + account.failed + account.stale
        assert account.dispatched == settled + account.pending, f"episodes were lost: {account}"
        return account
