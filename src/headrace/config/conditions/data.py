"""When the settings of data and evaluation sets have effect."""

from __future__ import annotations

from headrace.config.derived import has_rows, reads_rows
from headrace.config.effect import Condition

HAS_SETS = Condition(
    lambda s: bool(s.c.eval.sets), "there is no evaluation set", "remove it, or add a section [eval.sets.NAME]"
)
EVALUATED = Condition(
    # a callback may call trainer.evaluate()
    lambda s: s.c.eval.before or s.c.eval.after or s.c.eval.every > 0 or bool(s.c.trainer.callbacks),
    "eval.before and eval.after are false and eval.every is 0, so the set is never evaluated",
    "remove the set (--eval.sets={{}}), or set one of these",
)
ROWS = Condition(
    lambda s: has_rows(s.own.tasks), '{at}.tasks = "{own.tasks}" generates tasks, which have no other columns'
)
BAD_ROWS = Condition(lambda s: reads_rows(s.c), "all tasks are generated, so there are no bad rows")
SOURCE_NOT_MIXED = Condition(
    lambda s: not s.own.mixture, "data.mixture says where tasks come from", "set it in [data.mixture.NAME]"
)
SEVERAL_SOURCES = Condition(lambda s: len(s.c.data.mixture) > 1, "the mixture has only one source")
CURRICULUM = Condition(
    lambda s: s.own.target is not None,
    "data.curriculum.target is empty, so all tasks are drawn equally often",
    "remove it, or set data.curriculum.target",
)
NO_CURRICULUM = Condition(lambda s: s.own.curriculum.target is None, "the batches of a curriculum are all full")
OWN_TASKS = Condition(
    lambda s: s.own.tasks != "holdout", 'with {at}.tasks = "holdout" the tasks are taken as training has them'
)
WARM = Condition(lambda s: s.own.temperature > 0, "{at}.temperature is 0", "remove it, or raise {at}.temperature")
ATTEMPTS_DIFFER = Condition(
    lambda s: s.own.temperature > 0,
    "{at}.temperature is 0, where all attempts are the same",
    "raise {at}.temperature, or set attempts = 1",
)
OWN_WORKFLOW = Condition(lambda s: s.own.workflow is not None, "{at}.workflow is empty", "set {at}.workflow, too")
OWN_JUDGER = Condition(lambda s: s.own.judger is not None, "{at}.judger is empty", "set {at}.judger, too")
