"""What weight transport is made of: what is sent, to whom, how it travels, and what a completed sync has proved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """The learner's trained weights, as they are now."""

    async def digest(self) -> str:
        """A digest that a change of any of the weights changes; the engine takes the same of what it decodes with."""
        ...


class TensorStream(Protocol):
    """Full tensors under their Hugging Face names, always in the same order; read on the learner's thread or rank.

    Ranks that hold shards gather while they iterate, so every rank must iterate to the end.
    """

    def infos(self) -> list[TensorInfo]:
        """What will come, in order. Gathers nothing."""
        ...

    def chunks(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The tensors, some at a time: as many as fit into `max_bytes`, and at least one."""
        ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a stream; the dtype as torch names it ("float32")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine takes weights: plain data, so that it can be sent to the ranks that do the sending."""

    url: str
    protocol: str = "vllm"
    """Whose calls it understands."""
    world_size: int = 1
    """Workers behind it, each of which receives."""
    incarnation: int = 0
    """Counts restarts. A transfer group of an old incarnation is spent."""
    headers: tuple[tuple[str, str], ...] = ()


@runtime_checkable
class Reachable(Protocol):
    """What an engine of servers has beside: where its senders find them."""

    def endpoints(self) -> Sequence[Endpoint]:
        """Every server that is to receive the next weights, as it is now."""
        ...


def described(infos: Sequence[TensorInfo]) -> dict[str, list[Any]]:
    """What receiving ends hear of the tensors that come."""
    return {
        "names": [info.name for info in infos],
        "dtype_names": [info.dtype for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


class Transfer(Protocol):
    """How tensors travel to servers. Synchronous: it runs on the learner's thread, or in every one of its ranks."""

    def open(self, endpoints: Sequence[Endpoint], rank: int = 0) -> None:
        """Make ready to send to exactly these. Called before every send; keeps what is open and still right."""
        ...

    def send(self, source: TensorStream, version: int) -> str | None:
        """Bring all tensors to all endpoints; a digest of what arrived there, or None if nobody reports it.

        WeightSyncError, with the tensors' names, if what arrived is not what was sent.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class WeightSender(Protocol):
    """How weights travel from a source to one engine. The engine holds the other end of it."""

    @property
    def in_place(self) -> bool:
        """Whether nothing travels: the engine decodes with the learner's own tensors, and pauses while they change."""
        ...

    async def send(self, version: int) -> str | None:
        """Put the learner's weights where the engine takes them from: after `begin_update`, before `end_update`.

        Returns the digest of what arrived if receivers report one; it has been compared with what was sent.
        """
        ...


@dataclass(frozen=True, slots=True)
class SyncedWeights:
    """Weights that the engine is proved to decode with: their version, and the digest of their content."""

    version: int
    digest: str
