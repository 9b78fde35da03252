"""When the settings of [cluster] have effect."""

from __future__ import annotations

from headrace.config.derived import places_judgers, places_learners
from headrace.config.effect import Condition

PLACES = Condition(
    lambda s: places_learners(s.c) or places_judgers(s.c),
    'no part of the run is placed on a cluster: backend "{c.backend.name}" runs on this machine, and judge.placement '
    'is "local"',
    'remove it, or set backend.name = "fsdp" or "verl", or judge.placement = "ray"',
)
ON_RAY = Condition(
    lambda s: bool(s.own.address),
    "cluster.address is empty, so there is no cluster",
    'remove it, or set cluster.address to "auto", "local" or an address',
)
RAY_LEARNERS = Condition(
    lambda s: places_learners(s.c), 'backend "{c.backend.name}" runs in the trainer\'s own process'
)
RAY_JUDGERS = Condition(
    lambda s: places_judgers(s.c), 'judge.placement is "local"', 'remove it, or set judge.placement = "ray"'
)
