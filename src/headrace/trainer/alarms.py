"""Alarms: what a person must hear of a step, and what ends the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from headrace.config import AlarmSection
from headrace.errors import WeightSyncError


class Alarms:
    """Looks at the metrics of each step. A warning is given once."""

    def __init__(
        self, limits: AlarmSection, roles: Collection[str], samples_as_learned: bool, report: Callable[[str], None]
    ) -> None:
        """`roles` have settings of their own. Not `samples_as_learned`, sampler and learner differ by intention."""
        self._limits = limits
        self._roles = frozenset(roles)
        self._samples_as_learned = samples_as_learned
        self._report = report
        self._given: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Warn of what is odd in the metrics of a step; raise for what must end the run."""
        self._check_drift(step, values.get("drift/same_version", 0.0))
        if values.get("reward/uniform_groups") == 1.0 and values.get("policy/grad_norm") == 0.0:
            failed = values.get("batch/failed", 0.0)
            if failed:
                text = (
                    f"step {step}: {failed:g} episodes of the batch failed, and what is left of each group has equal "
                    f"rewards (mean {values['reward/mean']:g}), so nothing was learned; log.txt says why they failed"
                )
            else:
                text = (
                    f"step {step}: in every group all rewards are equal (mean {values['reward/mean']:g}), so nothing "
                    f"was learned; use tasks that are sometimes solved, or a reward that distinguishes rollouts"
                )
            self.warn_once("failed" if failed else "uniform", text)

    def check_roles(self, step: int, seen: Collection[str]) -> None:
        """Warn of settings for a role that no episode had: a name that is spelt otherwise in the workflow, say."""
        for name in self._roles.difference(seen) if seen else ():
            self.warn_once(
                f"role {name}",
                f"step {step}: algorithm.roles.{name} has had no effect, as no episode had a trajectory of that name "
                f"(there were {', '.join(sorted(seen))}); correct the name or remove it",
            )

    def warn_once(self, what: str, text: str) -> None:
        """Report it, unless something of the kind was reported."""
        if what not in self._given:
            self._given.add(what)
            self._report(text)

    def _check_drift(self, step: int, drift: float) -> None:
        """The learner's log-probabilities against those that the same version sampled with."""
        if not self._samples_as_learned or not drift > self._limits.warn_drift:
            return
        found = (
            f"step {step}: sampler and learner differ by {drift:.3g} on average on tokens of the same version "
            f"(log-probability)"
        )
        if drift > self._limits.stop_drift:
            raise WeightSyncError(
                f"{found}, above alarm.stop_drift {self._limits.stop_drift:g}: the engine does not sample from the "
                f"weights that were synced; restart it, or raise the limit if the two are known to compute "
                f"differently"
            )
        self.warn_once("drift", f"{found}; above alarm.warn_drift {self._limits.warn_drift:g} training is not exact")
