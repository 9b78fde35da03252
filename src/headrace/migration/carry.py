"""How each setting of another trainer is handled: it is carried over, has another name here, or has no counterpart.

A mapper reads the settings one by one and decides. What no mapper has decided is listed, too: nothing is dropped in
silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from headrace.config.loading import build_config
from headrace.errors import ConfigError


class Fate(StrEnum):
    """What became of a setting."""

    CARRIED = "carried over"
    RENAMED = "has another name here"
    LOST = "has no counterpart"
    IDLE = "not in effect there"


@dataclass(frozen=True, slots=True)
class Line:
    """One setting of the other trainer."""

    key: str
    value: Any
    fate: Fate
    ours: str = ""
    """The setting here; empty if there is none."""
    note: str = ""


Rest = Sequence[tuple[str, Fate, str]]
"""Pattern of keys, how they are handled, why. The first that fits decides."""


@dataclass(slots=True)
class Carry:
    """The settings of one configuration, on their way into a run file."""

    given: dict[str, Any]
    """Every value under its dotted key."""
    values: dict[str, Any] = field(default_factory=dict)
    """Our settings under their dotted keys."""
    lines: dict[str, Line] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    """What the user must still decide."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a setting, if the configuration has it."""
        value = self.given.get(key)
        return default if value is None else value

    def put(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """Carry a setting over. It counts as renamed unless its name is the same."""
        self.values[ours] = value
        same = key.rpartition(".")[2] == ours.rpartition(".")[2]
        self._line(key, Fate.CARRIED if same else Fate.RENAMED, ours, note)

    def part_of(self, key: str, ours: str, note: str = "") -> None:
        """A setting that decides, together with others, about one of ours."""
        self._line(key, Fate.RENAMED, ours, note)

    def as_here(self, key: str, note: str) -> None:
        """What Headrace does anyway."""
        self._line(key, Fate.CARRIED, "", note)

    def lose(self, key: str, why: str) -> None:
        """Nothing here does that."""
        self._line(key, Fate.LOST, "", why)

    def idle(self, key: str, why: str) -> None:
        """It has no effect in the configuration that it comes from."""
        self._line(key, Fate.IDLE, "", why)

    def one_of(self, key: str, ours: str, names: dict[Any, Any], what: str) -> bool:
        """Carry a choice over by its name here; one without a name here is lost, and left to the user."""
        value = self.given.get(key)
        if value in names:
            self.put(key, ours, names[value])
            return True
        self.lose(key, f"there is no such {what}; choose one: `headrace algorithms`")
        self.open.append(f"{ours}: {key} = {value!r} has no counterpart; choose another, or write your own")
        return False

    def finish(self, rest: Rest, decisive: Sequence[str] = ()) -> None:
        """Decide about all that is left. What fits `decisive` changes the training: if lost, the user must know."""
        for key, value in self.given.items():
            if key in self.lines:
                continue
            for pattern, fate, why in rest:
                if fnmatchcase(key, pattern):
                    off = fate is Fate.LOST and _is_off(value)
                    self._line(key, Fate.IDLE if off else fate, "", "not set" if off else why)
                    break
            else:
                known = _is_off(value)
                self._line(key, Fate.IDLE if known else Fate.LOST, "", "not set" if known else "unknown to this import")

        said = " ".join(self.open)
        for line in [line for line in self.lines.values() if line.fate is Fate.LOST and fits(line.key, decisive)]:
            if line.key not in said:
                self.open.append(f"{line.key} = {line.value!r}: {line.note}")

    def _line(self, key: str, fate: Fate, ours: str, note: str) -> None:
        if key in self.given:  # older versions do not have every setting
            self.lines[key] = Line(key, self.given[key], fate, ours, note)


@dataclass(frozen=True, slots=True)
class Imported:
    """A run file's settings, and what became of every setting of the configuration."""

    values: dict[str, Any]
    lines: tuple[Line, ...]
    open: tuple[str, ...]
    """What the user must decide before the run file can be used as it was meant."""

    def nested(self) -> dict[str, Any]:
        """The settings as tables in tables."""
        made: dict[str, Any] = {}
        for key, value in self.values.items():
            *parents, last = key.split(".")
            inner = made
            for part in parents:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return made


def finished(carry: Carry) -> Imported:
    """The result, with the problems that the settings would have here."""
    made = Imported(carry.values, tuple(carry.lines[key] for key in carry.given), tuple(carry.open))
    try:
        build_config(made.nested(), where="imported settings")
    except ConfigError as error:
        return Imported(made.values, made.lines, (*made.open, str(error)))
    return made


def fits(key: str, patterns: Sequence[str]) -> bool:
    """Whether a key is like one of the patterns."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", "???", -1) or value == {} or value == []
