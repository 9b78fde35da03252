"""What ranks are: how N copies of one program are started, called together, and given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import BackendError


@dataclass(frozen=True, slots=True)
class Program:
    """What every rank runs: `target` ("module:object") is called with the arguments, the rank and their number."""

    target: str
    arguments: tuple[Any, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


class Ranks(Protocol):
    """Synchronous: its caller has a thread for it, so that no event loop is ever inside a collective.

    All ranks compute together. After the loss of one, or an error that some of them did not have, the group is spent.
    """

    size: int

    def start(self) -> None:
        """Start all of them, and wait until their programs are built."""
        ...

    def call(self, method: str, *per_rank: Sequence[Any]) -> list[Any]:
        """Call a method on every rank; each argument is a sequence with one value per rank. Their results, in order.

        RanksLostError when the group is spent; a HeadraceError that a rank raised, with the group as it was.
        """
        ...

    def call_on(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method on one rank, in which it needs no other."""
        ...

    def host(self) -> str:
        """Where the others reach rank 0."""
        ...

    def local(self) -> tuple[int, ...]:
        """The ranks on this machine."""
        ...

    def kill(self) -> None:
        """End all of them at once, whatever they are doing."""
        ...


class RanksLostError(BackendError):
    """A group of ranks is spent: one of them has died, failed alone, or hangs."""
