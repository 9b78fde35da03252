"""When a setting has effect. Every section declares this for each of its fields; a setting without effect is refused.

A setting that has its default value is never refused: the user loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headrace.config import RunConfig, Section

_NAMES = {"workflow": ("workflow", "name"), "judger": ("workflow", "judger"), "tasks": ("data", "tasks")}
"""What Python code may give as an object, and the setting that names it otherwise. "eval_tasks" and "callbacks" are
others."""
_OBJECT = "given:object"


class Spot(NamedTuple):
    """Where a setting is: the complete configuration, its own section, and that section's key."""

    c: Any  # a RunConfig, whose sections are declared by means of this
    own: Any
    at: str


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold for a setting to have effect. `why` and `remedy` may name values: "{c.trainer.steps}"."""

    holds: Callable[[Spot], bool]
    why: str
    """The reason that the setting has no effect, if it does not hold."""
    remedy: str = "remove it"
    problem: str = "has no effect"

    def __call__(self, *names: str) -> Effects:
        """These fields have effect where this holds."""
        return dict.fromkeys(names, (self,))


Effects = dict[str, tuple[Condition, ...]]
"""Field to what must hold; nothing for a field that always has effect."""


def always(*names: str) -> Effects:
    """These fields always have effect."""
    return dict.fromkeys(names, ())


def declare(*given: Effects) -> Effects:
    """One declaration out of several; where a field is in more than one, all must hold."""
    found: Effects = {}
    for effects in given:
        for name, conditions in effects.items():
            found[name] = (*found.get(name, ()), *conditions)
    return found


class Idle(NamedTuple):
    """A setting that was set and has no effect."""

    key: str
    text: str
    condition: Condition


def idle_settings(config: RunConfig, objects: Collection[str] | None = None) -> Iterator[Idle]:
    """What differs from its default and has no effect.

    `objects` ("workflow", "judger", "tasks", "eval_tasks", "callbacks") are given in place of names. While that is not
    known (None), an object may still be given for each name that has its default.
    """
    as_run = _with_objects(config, _possible_objects(config) if objects is None else objects)
    for (at, section), (_, own) in zip(_sections(config, ""), _sections(as_run, ""), strict=True):
        spot = Spot(as_run, own, at)
        for name, conditions in section.effects.items():
            value = getattr(section, name)
            if value == defaults(type(section))[name]:
                continue
            failed = next((condition for condition in conditions if not condition.holds(spot)), None)
            if failed is not None:
                why, remedy = (text.format(c=config, own=section, at=at) for text in (failed.why, failed.remedy))
                shown = json.dumps(value, ensure_ascii=False, default=str)
                yield Idle(f"{at}.{name}", f"{at}.{name} = {shown} {failed.problem}: {why}; {remedy}", failed)


def _possible_objects(config: RunConfig) -> list[str]:
    usual = type(config)()
    named = [
        what
        for what, (section, key) in _NAMES.items()
        if getattr(getattr(config, section), key) == getattr(getattr(usual, section), key)
    ]
    return [*named, "eval_tasks", "callbacks"]


def _with_objects(config: RunConfig, objects: Collection[str]) -> RunConfig:
    """The configuration as if each object had a name of the user's own."""
    for what in objects:
        if what == "eval_tasks":
            given = {name: one for name, one in config.eval.sets.items() if one.tasks != "holdout"}
            sets = config.eval.sets | {name: one.model_copy(update={"tasks": _OBJECT}) for name, one in given.items()}
            changed = {"eval": config.eval.model_copy(update={"sets": sets})}
        elif what == "callbacks":
            changed = {"trainer": config.trainer.model_copy(update={"callbacks": (_OBJECT,)})}
        else:
            section, key = _NAMES[what]
            changed = {section: getattr(config, section).model_copy(update={key: _OBJECT})}
        config = config.model_copy(update=changed)
    return config


@cache
def defaults(section: type[Section]) -> dict[str, Any]:
    """The default of every field."""
    return {name: field.get_default(call_default_factory=True) for name, field in section.model_fields.items()}


def _sections(section: Section, at: str) -> Iterator[tuple[str, Section]]:
    """Every section inside, with those of tables of named sections."""
    if at:
        yield at, section
    for name, value in section:
        inner = value.items() if isinstance(value, dict) else (("", value),)
        for key, one in inner:
            if hasattr(type(one), "effects"):
                yield from _sections(one, ".".join(filter(None, (at, name, key))))
