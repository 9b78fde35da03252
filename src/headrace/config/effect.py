"""When a setting has effect. Every section declares it for each of its fields; what is set in vain is refused.

A setting that has its default value is never refused: nothing that the user asked for is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headrace.config import RunConfig, Section

_NAMES = {"workflow": "name", "judger": "judger"}
"""What Python code may give as an object, and the key of [workflow] that names it otherwise."""
_OBJECT = "given:object"


class Spot(NamedTuple):
    """Where a setting stands: the whole configuration, its own section, and that section's key."""

    c: Any  # a RunConfig, whose sections are declared by means of this
    own: Any
    at: str


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold for a setting to have effect. `why` and `remedy` may name values: "{c.trainer.steps}"."""

    holds: Callable[[Spot], bool]
    why: str
    """Where it does not hold, the reason that the setting has no effect."""
    remedy: str = "remove it"

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

    `objects` ("workflow", "judger") are those that are given in place of names. While that is not known (None), one may
    still be given for what is not named.
    """
    workflow, usual = config.workflow, type(config.workflow)()
    if objects is None:
        objects = [what for what, key in _NAMES.items() if getattr(workflow, key) == getattr(usual, key)]
    given = dict.fromkeys((_NAMES[what] for what in objects), _OBJECT)
    as_run = config.model_copy(update={"workflow": workflow.model_copy(update=given)})
    for at, section in _sections(config, ""):
        spot = Spot(as_run, section, at)
        for name, conditions in section.effects.items():
            value = getattr(section, name)
            if value == defaults(type(section))[name]:
                continue
            failed = next((condition for condition in conditions if not condition.holds(spot)), None)
            if failed is not None:
                why, remedy = (text.format(c=config, own=section, at=at) for text in (failed.why, failed.remedy))
                shown = json.dumps(value, ensure_ascii=False, default=str)
                yield Idle(f"{at}.{name}", f"{at}.{name} = {shown} has no effect: {why}; {remedy}", failed)


@cache
def defaults(section: type[Section]) -> dict[str, Any]:
    """The default of every field."""
    return {name: field.get_default(call_default_factory=True) for name, field in section.model_fields.items()}


def _sections(section: Section, at: str) -> Iterator[tuple[str, Section]]:
    """Every section within, also those of tables of named ones."""
    if at:
        yield at, section
    for name, value in section:
        inner = value.items() if isinstance(value, dict) else (("", value),)
        for key, one in inner:
            if hasattr(type(one), "effects"):
                yield from _sections(one, ".".join(filter(None, (at, name, key))))
