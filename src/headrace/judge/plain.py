"""Plain values on their way between a program in the sandbox and the host: tagged JSON, read strictly and bounded.

What comes from the sandbox is untrusted: any bytes are possible. `decode` makes values of exact builtin types of them
(and fractions, and handles), or raises NotPlainError. The cost is bounded by the number of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

_DEEPEST = 100
_MOST_HEX = 100_000  # digits of an int: 400,000 bits
_MOST_RATIO_HEX = 2_500  # the greatest common divisor takes quadratic time
_MOST_ALIKE = 64  # distinct values of one hash, in a set


class NotPlainError(Exception):
    """Not a plain value: malformed, too large, or an object of the program's own."""


class Handle:
    """An object that stays in the program, and its plain form, if it has one, as of answer number `asked`.

    It is no value to compute with: comparing it or asking for its truth is an error, in case a use of it is not
    resolved to its plain form first.
    """

    __slots__ = ("asked", "has_plain", "number", "value")

    def __init__(self, number: int | None, asked: int, has_plain: bool = False, value: Any = None) -> None:
        self.number = number
        self.asked = asked
        self.has_plain = has_plain
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise NotPlainError("an object of the program cannot be compared")

    def __bool__(self) -> bool:
        raise NotPlainError("an object of the program is neither true nor false")

    __hash__ = object.__hash__


def read_json(body: bytes) -> Any:
    """JSON of untrusted bytes."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NotPlainError(f"no JSON: {error}") from None


def decode(tagged: Any, asked: int = 0, depth: int = 0) -> Any:
    """The value that tagged JSON stands for: exact builtin types and fractions, and handles of other objects."""
    if tagged is None or type(tagged) in (bool, str):
        return tagged
    if type(tagged) is not dict or len(tagged) != 1 or depth > _DEEPEST:
        raise NotPlainError("no tagged value")
    ((tag, inner),) = tagged.items()
    try:
        if tag in _LEAVES:
            return _LEAVES[tag](inner)
        return _handle(inner, asked, depth) if tag == "h" else _container(tag, inner, asked, depth)
    except (ValueError, TypeError, OverflowError) as error:
        raise NotPlainError(f"malformed value: {error}") from None


def _container(tag: str, inner: Any, asked: int, depth: int) -> Any:
    if type(inner) is not list:
        raise NotPlainError("a container without a list")

    def inside(item: Any) -> Any:
        return decode(item, asked, depth + 1)

    if tag == "l":
        return [inside(item) for item in inner]
    if tag == "t":
        return tuple(inside(item) for item in inner)
    if tag == "s":
        return set(hashable(_key(inside(item)) for item in inner))
    if tag == "d":
        keys = hashable(_key(inside(key)) for key, _ in inner)
        return dict(zip(keys, (inside(item) for _, item in inner), strict=True))
    raise NotPlainError("an unknown tag")


def _handle(inner: Any, asked: int, depth: int) -> Handle:
    if type(inner) is not list or len(inner) not in (1, 2) or type(inner[0]) is not int or not 0 <= inner[0] < 2**31:
        raise NotPlainError("no handle")
    if len(inner) == 1:
        return Handle(inner[0], asked)
    value = decode(inner[1], asked, depth + 1)
    if isinstance(value, Handle):
        raise NotPlainError("a handle as a plain form")
    return Handle(inner[0], asked, True, value)


def hashable(values: Iterable[Any]) -> list[Any]:
    """The values, fit for a set or as keys: with many of one hash, building it would take quadratic time."""
    found = list(values)
    by_hash = sorted((hash(value), index) for index, value in enumerate(found))
    run: list[Any] = []
    for number, (code, index) in enumerate(by_hash):
        if number == 0 or by_hash[number - 1][0] != code:
            run = []
        if found[index] not in run:  # at most _MOST_ALIKE comparisons
            run.append(found[index])
        if len(run) > _MOST_ALIKE:
            raise NotPlainError("too many different values of one hash")
    return found


def _key(value: Any) -> Any:
    """A value as an element of a set or a key of a dict."""
    if isinstance(value, Handle):
        raise NotPlainError("an object of the program as a key")
    return frozenset(value) if type(value) is set else value


def _int(text: Any, most: int = _MOST_HEX) -> int:
    if type(text) is not str or len(text) > most:
        raise NotPlainError("no int, or a very large one")
    return int(text, 16)


def _float(text: Any) -> float:
    if type(text) is not str or len(text) > 40:
        raise NotPlainError("no float")
    return float.fromhex(text)


def _ratio(parts: Any) -> Fraction | int:
    above, below = (_int(part, _MOST_RATIO_HEX) for part in parts)
    if below <= 0:  # 0/0 would equal everything once it is multiplied out
        raise NotPlainError("no fraction")
    return Fraction(above, below)


def _complex(parts: Any) -> complex:
    real, imaginary = (_float(part) for part in parts)
    return complex(real, imaginary)


_LEAVES = {"i": _int, "f": _float, "y": bytes.fromhex, "r": _ratio, "c": _complex}


def encode(value: Any) -> Any:
    """Tagged JSON of a host value, for the program."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"i": hex(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is bytes:
        return {"y": value.hex()}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is Fraction:
        return {"r": [hex(value.numerator), hex(value.denominator)]}
    if kind in (list, tuple, set, frozenset):
        return {{list: "l", tuple: "t"}.get(kind, "s"): [encode(item) for item in value]}
    if kind is dict:
        return {"d": [[encode(key), encode(item)] for key, item in value.items()]}
    raise NotPlainError(f"a {kind.__name__} cannot be given to a program")
