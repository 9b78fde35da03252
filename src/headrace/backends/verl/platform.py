"""Which of verl's platforms a run uses. verl reads it once, when it is imported, so this comes first."""

from __future__ import annotations

import os

from headrace.config import RunConfig

_CPU = "headrace.backends.verl.cpu"


def on_gpus(config: RunConfig) -> bool:
    """Whether every rank has a GPU of its own."""
    return config.cluster.learner.get("GPU", 0) > 0


def platform_variables(config: RunConfig) -> dict[str, str]:
    """What says it to verl: nothing for the platforms of its own, which it finds by itself."""
    return {} if on_gpus(config) else {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": _CPU}


def choose_platform(config: RunConfig) -> None:
    """For this process."""
    os.environ.update(platform_variables(config))
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
