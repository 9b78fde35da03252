"""When the settings of [cluster] have effect."""

from __future__ import annotations

from headrace.config.derived import places_engines, places_judgers, places_learners, starts_engines
from headrace.config.effect import Condition

PLACES = Condition(
    lambda s: places_learners(s.c) or places_judgers(s.c) or places_engines(s.c),
    'no part of the run is placed on a cluster: backend "{c.backend.name}" runs on this machine, judge.placement is '
    '"local", and cluster.engine is empty',
    'remove it, or set backend.name = "fsdp" or "verl", judge.placement = "ray", or cluster.engine',
)
ON_RAY = Condition(
    lambda s: bool(s.own.address),
    "cluster.address is empty, so there is no cluster",
    'remove it, or set cluster.address to "auto", "local" or an address',
)
RAY_LEARNERS = Condition(
    lambda s: places_learners(s.c), 'backend "{c.backend.name}" runs in the trainer\'s own process'
)
RAY_ENGINES = Condition(
    lambda s: starts_engines(s.c),
    'with trainer.placement = "{c.trainer.placement}", engine.name = "{c.engine.name}" and engine.urls = '
    "{c.engine.urls}, Headrace starts no engine of its own",
    'remove it, or set trainer.placement = "separate" with an engine that Headrace starts',
)
RAY_JUDGERS = Condition(
    lambda s: places_judgers(s.c), 'judge.placement is "local"', 'remove it, or set judge.placement = "ray"'
)
