"""SyncCoordinator: versions, admission, what is in flight, and the account of episodes.

Pure logic: no clock, no I/O, no async. The trainer's loops and the simulator drive the very same object.
"""

from __future__ import annotations

from collections import Counter

from headrace.ledger.account import Account
from headrace.scheduling.staleness import StalenessPolicy


class SyncCoordinator:
    """Decides when work may start, and what a step must wait for.

    Batch k is trained to make version k + 1. A batch may be opened for every version up to `version + max_staleness`,
    so that generation runs ahead by no more than the bound. `capacity` and `over_sample` (a share of `batch_size`)
    bound the groups that run or wait; `batches` is how many the run needs in all; `largest_step` is how many groups a
    step may ask for (`enlarge`); `account` is where the run stood when it was interrupted.
    """

    def __init__(
        self,
        policy: StalenessPolicy,
        batch_size: int = 1,
        *,
        version: int = 0,
        over_sample: float | None = None,
        capacity: int | None = None,
        batches: int | None = None,
        largest_step: int = 0,
        account: Account | None = None,
    ) -> None:
        self.policy = policy
        self.version = version
        self._batch_size = batch_size
        self._ahead = batch_size * (1 + policy.max_staleness)
        self._window = self._ahead if over_sample is None else round(batch_size * (1 + over_sample))
        self._window = max(self._window, largest_step)
        self._capacity = capacity or 2 * self._ahead
        self._last_batch: int | None = None
        if batches is not None:
            self.needs(batches)
        self._batches_opened = version
        self._paused = False
        self._running: dict[int, int] = {}
        self._running_since: Counter[int] = Counter()
        self._running_overdue = 0  # kept up to date, so that admission is not a walk over all groups
        self._complete: dict[int, int] = {}
        self._in_step = 0
        self._extra = 0  # groups that the step takes beyond a batch, to be full
        self._surplus = 0  # groups that steps trained beyond a batch, as due or extra: the last would lack them
        account = account or Account()
        self._dispatched, self._pending = account.dispatched, account.pending
        self._trained, self._filtered = account.trained, account.filtered
        self._failed, self._stale = account.failed, account.stale

    # ---- admission ------------------------------------------------------------------------------------------------

    def may_open_batch(self) -> bool:
        """Whether the tasks of one more batch may be drawn."""
        more = -(-(self._overdue() + self._surplus + self._extra) // self._batch_size)
        if self._last_batch is not None and self._batches_opened >= self._last_batch + more:
            return False
        return self._batches_opened <= self.version + self.policy.max_staleness + more

    def open_batch(self) -> None:
        """The tasks of one more batch are drawn."""
        assert self.may_open_batch(), "a batch was opened beyond the staleness bound"
        self._batches_opened += 1

    def enlarge(self, extra: int) -> None:
        """The step that trains at this version takes so many groups beyond a batch: they may be opened for it."""
        self._extra = extra

    def needs(self, batches: int) -> None:
        """From this version on, the run needs so many batches, and no more are opened."""
        self._last_batch = self.version + batches

    def skipped(self) -> None:
        """An opened batch came to no update, so another may be opened for the same version."""
        self._batches_opened -= 1
        self._step_over()

    def _step_over(self) -> None:
        self._surplus += max(0, self._in_step - self._batch_size)
        self._in_step = self._extra = 0

    def may_start(self) -> bool:
        """Whether a group of an opened batch may start."""
        held = len(self._running) + len(self._complete)
        if self._paused or held >= self._capacity:
            return False
        on_time = held - self._overdue()
        # groups in training count until their weights are out: what starts now starts under the version before
        return on_time < self._window and on_time + self._in_step < self._ahead

    def pause(self) -> None:
        """No group starts until `resume`; what runs goes on. Waiting until none does is a drain."""
        self._paused = True

    def resume(self) -> None:
        """Groups may start again."""
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether groups are kept from starting."""
        return self._paused

    @property
    def in_flight(self) -> int:
        """Groups that are being rolled out."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Whole groups that wait to be trained."""
        return len(self._complete)

    def _overdue(self) -> int:
        """Running groups beyond the bound that do not count in admission; 0 where the policy does not excuse them."""
        return self._running_overdue if self.policy.excuses_overdue else 0

    # ---- the way of a group ---------------------------------------------------------------------------------------

    def started(self, group_id: int, episodes: int, since: int | None = None) -> None:
        """A group of so many episodes is being rolled out, under the current version (or, taken up, `since` an older
        one) and later ones."""
        born = self.version if since is None else since
        self._running[group_id] = born
        self._running_since[born] += 1
        self._running_overdue += born < self.version - self.policy.max_staleness
        self._dispatched += episodes
        self._pending += episodes

    def completed(self, group_id: int, oldest: int | None = None) -> None:
        """All episodes of a group are there, and it is to be trained; `oldest` is the version of its oldest token."""
        started = self._stopped(group_id)
        self._complete[group_id] = started if oldest is None else oldest

    def taken(self, group_id: int) -> None:
        """A whole group goes into the step that trains at this version."""
        del self._complete[group_id]
        self._in_step += 1

    def discarded(self, group_id: int) -> None:
        """A group comes to nothing."""
        if group_id in self._running:
            self._stopped(group_id)
        else:
            del self._complete[group_id]

    def _stopped(self, group_id: int) -> int:
        started = self._running.pop(group_id)
        self._running_since[started] -= 1
        if not self._running_since[started]:
            del self._running_since[started]
        if started < self.version - self.policy.max_staleness:
            self._running_overdue -= 1
        return started

    def due(self) -> list[int]:
        """Groups that must be in the step that trains at this version, or they would be too old for the next."""
        if not self.policy.waits_for_due:
            return []
        oldest = self.version - self.policy.max_staleness
        return sorted(g for held in (self._running, self._complete) for g, born in held.items() if born <= oldest)

    def complete_in_order(self) -> list[int]:
        """Whole groups that were started before every group that still runs, in the order of their start."""
        first = min(self._running, default=None)
        return sorted(group_id for group_id in self._complete if first is None or group_id < first)

    def stale(self) -> list[int]:
        """Whole groups that the policy throws away."""
        return sorted(g for g, oldest in self._complete.items() if self.policy.is_stale(self.version - oldest))

    def settled(self, *, trained: int = 0, filtered: int = 0, failed: int = 0, stale: int = 0) -> None:
        """Pending episodes found their end."""
        self._pending -= trained + filtered + failed + stale
        assert self._pending >= 0, "an episode was settled twice"
        self._trained += trained
        self._filtered += filtered
        self._failed += failed
        self._stale += stale

    # ---- versions -------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """The engine has the weights of `version`."""
        assert version == self.version + 1, f"version {version} was published after {self.version}"
        assert not self.due(), "weights were published before every due group was trained"
        self.version = version
        self._step_over()
        self._running_overdue += self._running_since[version - self.policy.max_staleness - 1]

    def account(self) -> Account:
        """The conservation count."""
        account = Account(self._dispatched, self._trained, self._filtered, self._failed, self._stale, self._pending)
        settled = account.trained + account.filtered + account.failed + account.stale
        assert account.dispatched == settled + account.pending, f"episodes were lost: {account}"
        return account
