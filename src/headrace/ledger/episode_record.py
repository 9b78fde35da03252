"""What an episode was told, kept so that it can be told the same again.

After a crash an episode's workflow is run again from its beginning, and every recorded answer of model, tools and
judger is handed back until the record ends; then it goes on live. A workflow that asks for something else than the
record says is not deterministic: its record is of no use, and the episode is started anew.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from headrace.data.episode import Episode, ModelOutput
from headrace.data.task import Message
from headrace.errors import WorkflowError

if TYPE_CHECKING:
    from headrace.engines.base import SamplingParams


class DivergedReplay(WorkflowError):
    """The workflow asked for something else than it did before the crash."""


class EpisodeRecord(Protocol):
    """The record of one attempt at an episode.

    `diverged` is set once a request differed from it, and `unused` tells whether it holds answers that were not asked
    for again: if there are any in the end, the workflow was not the same either. Digests identify requests; where
    nothing is kept (`keeps` is False) none are made.
    """

    keeps: bool
    attempt: int
    diverged: bool

    @property
    def unused(self) -> bool: ...

    def recall_call(self, number: int, digest: str) -> ModelOutput | None:
        """What the model answered to this call; None if it was not recorded."""
        ...

    def called(self, output: ModelOutput, role: str, seed: int, digest: str, messages: Sequence[Message]) -> None:
        """The model has answered."""
        ...

    def recall_result(self, number: int, digest: str) -> tuple[Any] | None:
        """What a tool or the judger answered, wrapped in a tuple; None if it was not recorded."""
        ...

    def resulted(self, number: int, kind: str, name: str, digest: str, payload: Any) -> None:
        """A tool or the judger has answered."""
        ...

    def finished(self, episode: Episode) -> None:
        """The episode is over and judged."""
        ...


class NoRecord:
    """Remembers nothing: evaluation, and runs without a ledger."""

    keeps = False
    attempt = 0
    diverged = False
    unused = False

    def recall_call(self, number: int, digest: str) -> ModelOutput | None:
        return None

    def called(self, output: ModelOutput, role: str, seed: int, digest: str, messages: Sequence[Message]) -> None: ...

    def recall_result(self, number: int, digest: str) -> tuple[Any] | None:
        return None

    def resulted(self, number: int, kind: str, name: str, digest: str, payload: Any) -> None: ...

    def finished(self, episode: Episode) -> None: ...


class Journal(Protocol):
    """Hands out the records of episodes."""

    def open(self, group_id: int, rollout_idx: int, seed: int) -> EpisodeRecord:
        """The record of the newest attempt at an episode, which may hold something already."""
        ...

    def restart(self, record: EpisodeRecord) -> EpisodeRecord:
        """An empty record for another attempt, in place of one that turned out to be of no use."""
        ...


class NoJournal:
    """For runs that keep no record."""

    def open(self, group_id: int, rollout_idx: int, seed: int) -> EpisodeRecord:
        return NoRecord()

    def restart(self, record: EpisodeRecord) -> EpisodeRecord:
        return NoRecord()


def call_digest(prompt_ids: Sequence[Any], params: SamplingParams, seed: int, role: str) -> str:
    """What identifies a model call: the same request has the same digest in another process."""
    try:
        parts = [array("q", prompt_ids).tobytes(), _packed_params(params), f"{seed} {role}".encode()]
    except TypeError:  # an image among the tokens, or a list among the parameters
        return _digest([list(prompt_ids), asdict(params), seed, role])
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


@lru_cache
def _packed_params(params: SamplingParams) -> bytes:
    return _packed(asdict(params))


def tool_digest(name: str, arguments: Any) -> str:
    """What identifies a call of a tool or a judger."""
    return _digest([name, arguments])


def _digest(thing: Any) -> str:
    return hashlib.blake2b(_packed(thing), digest_size=8).hexdigest()


def _packed(thing: Any) -> bytes:
    return json.dumps(thing, sort_keys=True, default=repr).encode()
