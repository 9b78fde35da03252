"""SyncCoordinator: versions, admission, groups in flight, and the account of episodes.

Pure logic: no clock, no I/O, no async. The trainer's loops and the simulator use the same class.
"""

from __future__ import annotations

from collections import Counter

from headrace.config import AgentLoopConfig
from headrace.ledger.account import Account
from headrace.scheduling.staleness import StalenessPolicy


class SyncCoordinator:
    """Decides when groups may start, and which groups a step must wait for.

    Training batch k makes version k + 1. A batch may be opened for every version up to `version + max_staleness`, so
    generation runs ahead by no more than the bound. `capacity` and `over_sample` (a share of `batch_size`) limit the
    groups that run or wait; `batches` is the number of batches that the run needs; `largest_step` is the most groups
    that a step may take (`enlarge`); `account` is the account of an interrupted run.
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
        self._running_overdue = 0  # updated incrementally: admission must not loop over all groups
        self._complete: dict[int, int] = {}
        self._in_step = 0
        self._extra = 0  # groups that the step takes in excess of its batch, to fill it
        self._surplus = 0  # groups that steps trained in excess of a batch: the last step would lack them
        account = account or Account()
        self._dispatched, self._pending = account.dispatched, account.pending
        self._trained, self._filtered = account.trained, account.filtered
        self._failed, self._stale = account.failed, account.stale

    @classmethod
    def from_config(
        cls, config: AgentLoopConfig, policy: StalenessPolicy, *, version: int = 0, batches: int | None = None,
        account: Account | None = None,
    ) -> SyncCoordinator:  # fmt: skip
        """With the limits that `[produce]` and `[trainer]` set."""
        produce = config.produce
        return cls(
            policy, config.fresh_groups, version=version, over_sample=produce.over_sample, capacity=produce.capacity,
            batches=batches, largest_step=config.trainer.batch_size, account=account,
        )  # fmt: skip

    # ---- admission ------------------------------------------------------------------------------------------------

    def may_open_batch(self) -> bool:
        """Whether another batch of tasks may be drawn."""
        more = -(-(self._overdue() + self._surplus + self._extra) // self._batch_size)
        if self._last_batch is not None and self._batches_opened >= self._last_batch + more:
            return False
        return self._batches_opened <= self.version + self.policy.max_staleness + more

    def open_batch(self) -> None:
        """Another batch of tasks is drawn."""
        assert self.may_open_batch(), "a batch was opened beyond the staleness bound"
        self._batches_opened += 1

    def enlarge(self, extra: int) -> None:
        """The step at this version takes `extra` groups in excess of its batch; they may be opened for it."""
        self._extra = extra

    def needs(self, batches: int) -> None:
        """From this version on, the run needs this many batches; no more are opened."""
        self._last_batch = self.version + batches

    def skipped(self) -> None:
        """An opened batch made no update; another may be opened for the same version."""
        self._batches_opened -= 1
        self._end_step()

    def _end_step(self) -> None:
        self._surplus += max(0, self._in_step - self._batch_size)
        self._in_step = self._extra = 0

    def may_start(self) -> bool:
        """Whether a group of an opened batch may start."""
        held = len(self._running) + len(self._complete)
        if self._paused or held >= self._capacity:
            return False
        on_time = held - self._overdue()
        # groups in training count until the weight sync: what starts now starts under the version before
        return on_time < self._window and on_time + self._in_step < self._ahead

    def pause(self) -> None:
        """No group starts until `resume`. Running groups continue; waiting for them is a drain."""
        self._paused = True

    def resume(self) -> None:
        """Groups may start again."""
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether no group may start."""
        return self._paused

    @property
    def in_flight(self) -> int:
        """Groups that are being rolled out."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Complete groups that wait to be trained."""
        return len(self._complete)

    def _overdue(self) -> int:
        """Running groups over the bound that admission does not count; 0 if the policy counts them."""
        return self._running_overdue if self.policy.excuses_overdue else 0

    # ---- the life of a group ----------------------------------------------------------------------------------------

    def started(self, group_id: int, episodes: int, since: int | None = None) -> None:
        """A group of `episodes` episodes is running, from the current version on (a resumed one: from `since` on)."""
        born = self.version if since is None else since
        self._running[group_id] = born
        self._running_since[born] += 1
        self._running_overdue += born < self.version - self.policy.max_staleness
        self._dispatched += episodes
        self._pending += episodes

    def completed(self, group_id: int, oldest: int | None = None) -> None:
        """A group is complete and waits to be trained; `oldest` is the version of its oldest token."""
        started = self._stop_running(group_id)
        self._complete[group_id] = started if oldest is None else oldest

    def taken(self, group_id: int) -> None:
        """The step at this version takes a complete group."""
        del self._complete[group_id]
        self._in_step += 1

    def discarded(self, group_id: int) -> None:
        """A group will not be trained."""
        if group_id in self._running:
            self._stop_running(group_id)
        else:
            del self._complete[group_id]

    def _stop_running(self, group_id: int) -> int:
        started = self._running.pop(group_id)
        self._running_since[started] -= 1
        if not self._running_since[started]:
            del self._running_since[started]
        if started < self.version - self.policy.max_staleness:
            self._running_overdue -= 1
        return started

    def due(self) -> list[int]:
        """Groups that the step at this version must take: at the next version they would be too old."""
        if not self.policy.waits_for_due:
            return []
        oldest = self.version - self.policy.max_staleness
        return sorted(g for held in (self._running, self._complete) for g, born in held.items() if born <= oldest)

    def complete_in_order(self) -> list[int]:
        """Complete groups that started before every running group, in the order of their start."""
        first = min(self._running, default=None)
        return sorted(group_id for group_id in self._complete if first is None or group_id < first)

    def stale(self) -> list[int]:
        """Complete groups that the policy drops."""
        return sorted(g for g, oldest in self._complete.items() if self.policy.is_stale(self.version - oldest))

    def settled(self, *, trained: int = 0, filtered: int = 0, failed: int = 0, stale: int = 0) -> None:
        """Pending episodes have reached a final state."""
        self._pending -= trained + filtered + failed + stale
        assert self._pending >= 0, "an episode was settled twice"
        self._trained += trained
        self._filtered += filtered
        self._failed += failed
        self._stale += stale

    # ---- versions -------------------------------------------------------------------------------------------------

    def synced(self, version: int) -> None:
        """The engine has the weights of `version`."""
        assert version == self.version + 1, f"version {version} was synced after {self.version}"
        assert not self.due(), "weights were synced before every due group was trained"
        self.version = version
        self._end_step()
        self._running_overdue += self._running_since[version - self.policy.max_staleness - 1]

    def account(self) -> Account:
        """The account of episodes, checked."""
        account = Account(self._dispatched, self._trained, self._filtered, self._failed, self._stale, self._pending)
        settled = account.trained + account.filtered + account.failed + account.stale
        assert account.dispatched == settled + account.pending, f"episodes were lost: {account}"
        return account
