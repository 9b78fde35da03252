"""What weight transport is made of: what is sent, how it travels, and what a completed sync has proved."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class SyncedWeights:
    """Weights that the engine decodes with: their version, and a fingerprint of their content."""

    version: int
    fingerprint: str

    @classmethod
    def confirmed(cls, version: int, ours: str, theirs: str) -> SyncedWeights:
        """Weights that arrived: the learner's fingerprint is that of what the engine decodes with."""
        if theirs != ours:
            raise WeightSyncError(
                f"version {version} did not arrive: the learner's weights have the fingerprint {ours}, the engine "
                f"decodes with {theirs}; resume from the last checkpoint, and report it if it happens again"
            )
        return cls(version, ours)
