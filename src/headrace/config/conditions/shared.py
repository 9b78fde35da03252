"""Conditions that sections of several files have in common."""

from __future__ import annotations

from headrace.config.derived import rolls_out, varies
from headrace.config.effect import Condition

ONE_CALL = {"single_turn", "demonstration", "preference"}
_GIVEN_TEXTS = "objective {c.algorithm.objective} trains on given texts, not on rollouts"
ROLLS_OUT = Condition(lambda s: rolls_out(s.c), _GIVEN_TEXTS)
SAMPLES = Condition(
    lambda s: rolls_out(s.c) or bool(s.c.eval.sets),
    f"{_GIVEN_TEXTS}, and there is no evaluation set",
    "remove it, or add a section [eval.sets.NAME]",
)
AHEAD = Condition(
    lambda s: s.c.trainer.max_staleness > 0 or varies(s.c, "trainer.max_staleness"),
    "trainer.max_staleness is 0, so nothing is generated ahead of training",
    "remove it, or raise trainer.max_staleness",
)
NOT_TINKER = Condition(
    lambda s: s.c.backend.name != "tinker",
    'backend "tinker" leaves it to the service',
    "remove it, or change backend.name",
)
