"""How learner and engine share one machine: whose thread, and how many."""

from __future__ import annotations

import os

from headrace.config import RunConfig
from headrace.config.derived import places_engines
from headrace.errors import ConfigError

DETERMINISTIC_THREADS = 2
"""Where none are set: sums are cut into as many parts as there are threads, so their number is part of a result."""
DETERMINISTIC_ROWS = 32
"""Rows of a product in decoding: of a fixed number, which makes a sequence independent of its neighbours."""


def takes_turns(config: RunConfig) -> bool:
    """Whether the engine has nothing to do while the learner works, and they may share a thread."""
    return config.trainer.placement == "colocate" and config.trainer.max_staleness == 0


def learner_threads(config: RunConfig) -> int:
    """Threads of the learner; 0 for the tensor library's own choice.

    Of a deterministic run the same on every machine, in every environment and placement.
    """
    if config.run.deterministic:
        return config.backend.threads or DETERMINISTIC_THREADS
    if config.backend.threads or config.trainer.placement == "colocate":
        return config.backend.threads
    engines = 0 if places_engines(config) else engine_threads(config) * config.engine.replicas
    return max(1, _cores() - engines)  # both with all cores would stand in each other's way


def check_threads(config: RunConfig) -> None:
    """With `run.deterministic` the number of threads must be what it is set to."""
    if config.run.deterministic:
        _require_threads(max(learner_threads(config), engine_threads(config)))


def _require_threads(count: int) -> None:
    """OpenMP gives the threads that are asked for, unless its settings say otherwise."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    if os.environ.get("OMP_DYNAMIC", "").strip().lower() in ("true", "1"):
        found = f"OMP_DYNAMIC={os.environ['OMP_DYNAMIC']}"
    elif limit.strip().isdecimal() and int(limit) < count:
        found = f"OMP_THREAD_LIMIT={limit}"
    else:
        return
    raise ConfigError(
        f"run.deterministic computes with exactly {count} threads, and {found} may give it fewer; unset it, or set "
        f"backend.threads = 1"
    )


def engine_threads(config: RunConfig) -> int:
    """Threads of an engine in a process of its own; of each, if there are several."""
    if config.run.deterministic:
        return config.engine.threads or learner_threads(config)
    if places_engines(config):
        return config.engine.threads or max(1, int(config.cluster.engine.get("CPU", 1)))
    return config.engine.threads or max(1, _cores() // 2 // config.engine.replicas)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
