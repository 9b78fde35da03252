"""When the settings of the training loop and of the simulator have effect."""

from __future__ import annotations

from headrace.config.derived import samples_as_learned, saves, varies
from headrace.config.effect import Condition

CACHE_SHARED = Condition(
    lambda s: not s.own.release_cache or s.own.placement == "colocate",
    "a separate engine shares no memory with the learner",
)
SAVES_ON_THE_WAY = Condition(
    lambda s: saves(s.own),
    "trainer.save_every and trainer.save_every_s are 0, so only the last step is saved",
    "remove it, or set one of these",
)
COPIES = Condition(
    lambda s: not s.own.save_async or saves(s.own),
    "trainer.save_every and trainer.save_every_s are 0, and the last step is saved without a copy",
    "remove it, or set one of these",
)
KEEPS_BEST = Condition(lambda s: s.own.keep_best > 0, "trainer.keep_best is 0", "remove it, or set trainer.keep_best")
SAMPLES_AS_LEARNED = Condition(
    lambda s: samples_as_learned(s.c),
    "with rollout.top_p, rollout.top_k, model.lora.dropout or engine.weights changed, sampler and learner differ by "
    "intention, and are not compared",
)
GIVEN_DURATIONS = Condition(
    lambda s: s.own.from_run is None, "simulate.from_run has measured it", "remove one of the two"
)
GIVEN_SLOTS = Condition(
    lambda s: s.c.simulate.from_run is None,
    "the durations of simulate.from_run were measured on the engines that the run had",
    "remove one of the two",
)
NODES_ARE_LOST = Condition(
    lambda s: s.own.mtbf_h > 0 or varies(s.c, "simulate.fleet.mtbf_h"),
    "simulate.fleet.mtbf_h is 0, so no node is lost",
    "remove it, or set simulate.fleet.mtbf_h",
)
SYNC_COSTS = Condition(
    lambda s: s.own.weights_gb > 0 or varies(s.c, "simulate.fleet.weights_gb"),
    "simulate.fleet.weights_gb is 0, so weight syncs are part of simulate.learn_s",
    "remove it, or set simulate.fleet.weights_gb",
)
SYNC_BY_FILE = Condition(
    lambda s: s.own.transport == "file" or varies(s.c, "simulate.fleet.transport"),
    'simulate.fleet.transport is "{own.transport}"',
    'remove it, or set simulate.fleet.transport = "file"',
)
SLOW_TASKS = Condition(
    lambda s: s.own.slow_share > 0 or varies(s.c, "simulate.slow_share"),
    "simulate.slow_share is 0",
    "remove it, or set simulate.slow_share",
)
DROPS_UNIFORM = Condition(
    lambda s: s.c.filters.drop_uniform or varies(s.c, "filters.drop_uniform"),
    "nothing filters groups",
    "remove it, or set filters.drop_uniform = true",
)
MEASURES_DRIFT = Condition(
    lambda s: s.c.trainer.staleness not in ("count", "drop", "wait", "mask") or varies(s.c, "trainer.staleness"),
    'trainer.staleness = "{c.trainer.staleness}" does not measure how far the policy has moved',
)
