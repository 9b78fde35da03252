"""How the threads of tensor operations wait for each other.

OpenMP's threads meet after every operation. GNU's, which torch brings along, wait awake for milliseconds before they
sleep: beside other work on the machine, they burn the time that the thread which they wait for would need, and a step
takes ten times as long. Threads that sleep at once are slow on a quiet machine: most waits are shorter than falling
asleep and being woken. So they wait awake for as long as most waits take, and sleep then.
"""

from __future__ import annotations

import os

SPINS = "2000"
"""Turns of the waiting loop: 30 to 100 microseconds, by the processor."""

_POLICY, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"


def limit_spinning() -> None:
    """Set in the environment, unless the user has chosen. OpenMP reads it when torch loads, here and in children."""
    if _POLICY not in os.environ:
        os.environ.setdefault(_SPINS, SPINS)


def unchanged_environment() -> dict[str, str]:
    """The environment without that, for programs that are not Headrace's."""
    return {name: value for name, value in os.environ.items() if (name, value) != (_SPINS, SPINS)}
