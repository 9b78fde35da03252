"""The answers that an episode got, recorded so that it gets the same again.

After a crash an episode's workflow runs again from its beginning. It gets every recorded answer of model, tools and
judger until the record ends, and new ones from there on. A workflow that asks for something else than the record says
is not deterministic: its record is of no use, and the episode is restarted.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace.data.episode import Episode, ModelOutput
from headrace.data.task import Message
from headrace.errors import WorkflowError

if TYPE_CHECKING:
    from headrace.engines.base import SamplingParams


class DivergedReplay(WorkflowError):
    """The workflow asked for something else than it did before the crash."""


class AttemptRecord:
    """The record of one attempt at an episode. This one keeps nothing: evaluation, and runs without a ledger.

    `diverged` is set once a request differed from the record. `unused` says whether it holds answers that were not
    asked for again: if there are any in the end, the workflow was not the same either. Digests identify requests; where
    nothing is kept (`keeps` is False) none are made.
    """

    keeps = False
    attempt = 0
    diverged = False

    @property
    def unused(self) -> bool:
        return False

    def recall_call(self, number: int, digest: str) -> ModelOutput | None:
        """What the model answered to this call; None if it was not recorded."""
        return None

    def called(self, output: ModelOutput, role: str, seed: int, digest: str, messages: Sequence[Message]) -> None:
        """The model has answered."""

    def recall_result(self, number: int, digest: str) -> tuple[Any] | None:
        """What a tool or the judger answered, wrapped in a tuple; None if it was not recorded."""
        return None

    def resulted(self, number: int, kind: str, name: str, digest: str, payload: Any) -> None:
        """A tool or the judger has answered."""

    def finished(self, episode: Episode) -> None:
        """The episode is over and judged."""


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
