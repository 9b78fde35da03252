"""How long OpenMP threads spin before they sleep.

OpenMP threads wait for each other after every tensor operation. GNU's OpenMP, which torch ships, spins for milliseconds
before it sleeps. On a busy machine the spinning threads take the cores from the thread that they wait for, and a step
takes ten times as long. Without spinning a step is slow on a quiet machine: most waits are shorter than falling asleep
and waking up. So the threads spin for as long as most waits take, then sleep.
"""

from __future__ import annotations

import os

SPINS = "2000"
"""Iterations of the spin loop: 30 to 100 microseconds, depending on the processor."""

_POLICY, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"


def limit_spinning() -> None:
    """Set the environment variable, unless the user set a policy. OpenMP reads it when torch loads, in children too."""
    if _POLICY not in os.environ:
        os.environ.setdefault(_SPINS, SPINS)


def unchanged_environment() -> dict[str, str]:
    """The environment without our variable, for other programs."""
    return {name: value for name, value in os.environ.items() if (name, value) != (_SPINS, SPINS)}
