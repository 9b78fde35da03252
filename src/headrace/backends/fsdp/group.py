"""LearnerGroup: the ranks as one learner. A batch is spread over them; after the loss of one, all are started again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.backends.base import Scorer, Trained
from headrace.backends.fsdp.call_log import CallLog, Logged
from headrace.backends.fsdp.launching import Launcher
from headrace.backends.fsdp.shares import Share, gather_rows, merge_trained, shares_of
from headrace.backends.local.token_losses import require_trainable
from headrace.backends.ranks.base import Ranks, RanksLostError
from headrace.config import AlgorithmSection
from headrace.data.episode import Step
from headrace.data.sample import TrainBatch
from headrace.errors import DivergedError, SnapshotLostError
from headrace.models.packed import require_text
from headrace.tracking.metrics import MetricsAggregator

_log = logging.getLogger("headrace")
_MOST_LOSSES = 3
"""In a row, in one and the same call."""


class LearnerGroup:
    """Synchronous, called on one thread. A group that is started again may have fewer ranks, or more.

    `split` neighbours split every layer (tensor parallelism): they have the same rows, and find the same.
    """

    def __init__(self, launcher: Launcher, budget: int, groups_apart: bool = False, split: int = 1) -> None:
        self._launcher, self._cut, self._split = launcher, (budget, groups_apart), split
        self._log = CallLog()
        self.restarts = 0
        self.ranks = self._started()

    # ---- what the ranks do together --------------------------------------------------------------------------------

    def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        """Spread the batch, and merge what the ranks found. What is wrong with it is found here, not on some rank."""
        require_trainable(algorithm, batch)
        require_text(sample.tokens for sample in batch.samples)
        return self._logged("forward_backward", batch, algorithm)

    def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        """All ranks make the same step; its metrics once."""
        return self._logged("optim_step", lr, grad_scale)

    def refresh_teacher(self) -> None:
        """Copy the policy's weights into every rank's teacher."""
        self._logged("refresh_teacher")

    def logprobs(self, batch: TrainBatch, of: Scorer) -> list[list[float]]:
        """Per sample, the log-probability of every target."""
        require_text(sample.tokens for sample in batch.samples)
        return self._safely(lambda: self._spread("score_share", batch, of))

    def values(self, batch: TrainBatch) -> list[list[float]]:
        """Per sample, the value head's estimate before every target."""
        return self._safely(lambda: self._spread("value_share", batch))

    def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        """Per step, the teacher's log-probability of every response token."""

        def ask() -> list[list[float]]:
            size = self.ranks.size
            found = self.ranks.call("teacher_logprobs", [tuple(steps[rank::size]) for rank in range(size)])
            return [found[number % size][number // size] for number in range(len(steps))]

        return self._safely(ask)

    def save(self, folder: Path) -> None:
        """Every rank writes its shards."""
        self._log.mark()
        self.together("save", folder)

    def snapshot(self) -> None:
        """Every rank copies its shards."""
        self.together("snapshot")
        self._log.mark()

    def write_snapshot(self, folder: Path) -> None:
        """Every rank begins to write its copy, beside what it is called for."""
        self.together("write_snapshot", folder)

    def snapshot_written(self) -> bool:
        """Whether all have written; SnapshotLostError if ranks were started again since."""
        found = self.together("snapshot_written")
        if None in found:
            raise SnapshotLostError("ranks were lost while a checkpoint was written, and their copies with them")
        return all(found)

    def load(self, folder: Path) -> None:
        """Read a checkpoint of any number of ranks, or of the local backend."""
        self.together("load", folder)
        self._log.restart(folder)

    def saved(self, folder: Path) -> None:
        """The checkpoint that was saved last is at `folder` now: the ranks can be brought back from there."""
        self._log.saved(folder)
        if self._launcher.has_more():
            self._safely(lambda: None, "there is room for more ranks")

    def together(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method with the same arguments on every rank; all results."""
        return self._safely(lambda: self._same(method, *arguments))

    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on this machine, which can map what this process has mapped."""
        return self.ranks.local()

    def close(self) -> None:
        """End the ranks."""
        self.ranks.kill()
        self._log.close()

    # ---- the loss of a rank ----------------------------------------------------------------------------------------

    def _logged(self, method: str, *arguments: Any) -> Any:
        """A call that changes the ranks' state. It is logged once it is done: one that fails is made again."""
        call = Logged(method, arguments)
        found = self._safely(lambda: self._make(call))
        self._log.append(method, *arguments)
        return found

    def _make(self, call: Logged) -> Any:
        if call.method == "forward_backward":
            return self._learn(*call.arguments)
        return self._same(call.method, *call.arguments)[0]

    def _safely(self, function: Callable[[], Any], again: object = None) -> Any:
        """If a rank is lost, bring new ones to where the lost ones were, and do it again. They may be lost, too.

        `again` is why all are to be started again before it.
        """
        lost: RanksLostError | None = None
        for _ in range(_MOST_LOSSES):
            try:
                if again is not None:
                    self._rebuild(again)
                return function()
            except RanksLostError as error:
                again = lost = error
        raise RanksLostError(
            f"{lost}; ranks were lost {_MOST_LOSSES} times in the same call, and the run ends"
        ) from lost

    def _rebuild(self, why: object) -> None:
        """From the checkpoint, then by the calls since it. With as many ranks as before, to the bit."""
        began = time.monotonic()
        self.ranks.kill()
        self.restarts += 1
        _log.warning("%s; all ranks are started again from %s", why, self._log.checkpoint or "the model")
        self.ranks = self._started()
        if self._log.checkpoint is not None:
            self._same("load", self._log.checkpoint)
        calls = 0
        for call in self._log:
            self._make(call)
            calls += 1
        _log.warning(
            "%d ranks are back after %.1f s; %d calls were repeated", self.ranks.size, time.monotonic() - began, calls
        )

    def _started(self) -> Ranks:
        ranks = self._launcher.new()
        try:
            ranks.start()
            address = ranks.call_on(0, "listen", ranks.host()) if ranks.size > 1 else None
            ranks.call("join", [address] * ranks.size)
        except BaseException:
            ranks.kill()
            raise
        return ranks

    # ---- one call --------------------------------------------------------------------------------------------------

    def _learn(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        try:
            shares, found = self._shared("learn_share", batch, algorithm)
        except DivergedError:
            self._same("clear_gradients")  # all have a part of it
            raise
        return merge_trained(shares, found, len(batch.samples))

    def _spread(self, method: str, batch: TrainBatch, *arguments: Any) -> list[Any]:
        shares, found = self._shared(method, batch, *arguments)
        return gather_rows(shares, found, len(batch.samples))

    def _shared(self, method: str, batch: TrainBatch, *arguments: Any) -> tuple[list[Share], list[Any]]:
        """The shares of a batch, and what is found for each."""
        size = self.ranks.size
        shares = shares_of(batch, size // self._split, *self._cut)
        given = [share for share in shares for _ in range(self._split)]
        found = self.ranks.call(method, given, *([argument] * size for argument in arguments))
        return shares, found[:: self._split]

    def _same(self, method: str, *arguments: Any) -> list[Any]:
        return self.ranks.call(method, *([argument] * self.ranks.size for argument in arguments))
