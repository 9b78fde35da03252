"""JSON for frozen data classes: exact round trip, decoded by their type hints."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from types import MemberDescriptorType, NoneType, UnionType
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.errors import DataError

T = TypeVar("T")


class JsonData:
    """Mixin for frozen data classes: `to_dict`, `from_dict`, `to_json`, `from_json`."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and scalars."""
        return {f.name: _encode(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; an unknown or missing key is an error that names it."""
        types = _field_types(cls)
        unknown = sorted(set(values) - set(types))
        if unknown:
            raise DataError(f"{cls.__name__} has no field {', '.join(unknown)}; its fields are {', '.join(types)}")
        missing = [name for name in _required(cls) if name not in values]
        if missing:
            raise DataError(f"{cls.__name__} needs the field {', '.join(missing)}, which is missing")
        decoded = {name: _decode_field(cls, name, value) for name, value in values.items()}
        try:
            return cls(**decoded)
        except TypeError as error:  # null where a list must be
            raise DataError(f"{cls.__name__}: {error}") from None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))


@cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def _required(cls: type) -> list[str]:
    return [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]


_SCALARS = frozenset({str, int, float, bool, NoneType})


def copied(value: Any) -> Any:
    """`copy.deepcopy`, several times faster on plain data: messages, metadata. It has no cycles."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return value.copy() if _SCALARS.issuperset(map(type, value)) else [copied(item) for item in value]
    return copy.deepcopy(value)


def as_tuples(thing: Any, *names: str) -> None:
    """Turn lists among the fields of a frozen object into tuples; for its `__post_init__`."""
    for name in names:
        value = getattr(thing, name)
        if value is not None and not isinstance(value, tuple):
            object.__setattr__(thing, name, tuple(value))


def altered(thing: T, **values: Any) -> T:
    """`dataclasses.replace` in a fraction of the time, for values that need no check: `__post_init__` is not called."""
    slots = _slots(type(thing))
    if slots is None:
        return replace(thing, **values)  # type: ignore[type-var]
    made = object.__new__(type(thing))
    for name, read, write in slots:
        write(made, values[name] if name in values else read(thing))
    return made


@cache
def _slots(cls: Any) -> list[tuple[str, Callable[[Any], Any], Callable[[Any, Any], None]]] | None:
    """Each field's name, and what reads and writes it; None if one is no slot of the class itself: a subclass."""
    found = [(f.name, cls.__dict__.get(f.name)) for f in fields(cls)]
    if not all(isinstance(slot, MemberDescriptorType) for _, slot in found):
        return None
    return [(name, slot.__get__, slot.__set__) for name, slot in found if slot is not None]


def _encode(value: Any) -> Any:
    if isinstance(value, JsonData):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value


def _decode_field(cls: type, name: str, value: Any) -> Any:
    try:
        return _decode(_field_types(cls)[name], value)
    except TypeError:
        raise DataError(f"{cls.__name__}: {name} cannot be {value!r}") from None


def _decode(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not NoneType]
        return _decode(options[0], value) if len(options) == 1 else value
    if origin is tuple:
        item = get_args(kind)[0]
        if item in (int, float, str):  # token arrays: no per-item dispatch
            return tuple(value)
        return tuple(_decode(item, entry) for entry in value)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return kind.from_dict(value)  # type: ignore[attr-defined]
    return value
