"""Groups of verl workers that tests use one after the other: starting one takes as long as many tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.verl.platform import choose_platform
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.registry import load_object

# Ray would end workers because of the memory that other programs on the machine take
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
WHY = "verl is not installed; `make verl`, then run this with .venv-verl/bin/python -m pytest"
CLUSTER = {
    "address": "local",
    "learner": {"CPU": 0.1},
    "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},  # where the workers' class is
}


def has_verl() -> bool:
    return importlib.util.find_spec("verl") is not None


def verl_sections(ranks: int, **more: Any) -> dict[str, Any]:
    """Sections of a run with the backend "verl"."""
    given: dict[str, Any] = {
        "backend": {"name": "verl", "ranks": ranks},
        "trainer": {"placement": "separate"},
        "cluster": dict(CLUSTER),
        "model": {"dtype": "float32"},
    }
    return {key: {**given.get(key, {}), **more.get(key, {})} for key in given.keys() | more.keys()}


@contextmanager
def pooled_workers() -> Iterator[None]:
    """Workers that a backend gives up are given to the next one, which builds its model in them anew."""
    choose_platform(build_config(verl_sections(1)))
    launching: Any = load_object("headrace.backends.verl.launching:VerlLauncher")
    pooled: Any = load_object("verl_pooled:PooledRanks")
    with pytest.MonkeyPatch.context() as patch:

        def new(self: Any) -> Any:
            config: RunConfig = self._config
            size = config.backend.ranks
            return pooled.taken(config, size) or pooled(config, self._placed())

        patch.setattr(launching, "new", new)
        yield
    pooled.close_all()
