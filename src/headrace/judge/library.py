"""What a test may use on the host: operators, builtins, modules and methods, each bounded in what it can cost.

Any operand may come from an untrusted program. So all values are plain, no object of an unknown class is called, and no
small input gives a large result: no `"x" * 10**9`, no `9**9**9`.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from headrace.judge.plain import NotPlainError, hashable

_MOST_ITEMS = 1_000_000
_MOST_BITS = 1_000_000
_MOST_RATIO_BITS = 20_000
_MOST_DIVISION_BITS = 100_000  # division and modulo take quadratic time


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _bits(value: Any) -> int:
    if isinstance(value, Fraction):
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        _check(bits, _MOST_RATIO_BITS)
        return bits
    return value.bit_length() if isinstance(value, int) else 64


def _check(size: int, most: int) -> None:
    if size > most:
        raise NotPlainError(f"a result of size {size}, where {most} is the most")


def _add(left: Any, right: Any) -> Any:
    if hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check(len(left) + len(right), _MOST_ITEMS)
    for value in (left, right):
        _bits(value)
    return left + right


def _subtract(left: Any, right: Any) -> Any:
    for value in (left, right):
        _bits(value)
    return left - right


def _multiply(left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if hasattr(many, "__len__"):
            _check(len(many) * max(int(times), 0), _MOST_ITEMS)
            return many * times
    _check(_bits(left) + _bits(right), _MOST_BITS)
    return left * right


def _power(left: Any, right: Any, modulus: Any = None) -> Any:
    if modulus is not None:
        _check(max(_bits(left), _bits(right), _bits(modulus)), 4096)
        return pow(left, right, modulus)
    if isinstance(left, (int, Fraction)) and isinstance(right, (int, Fraction)):
        _check(_bits(right), 64)
        _check(_bits(left) * max(int(abs(right)), 1), _MOST_BITS)
    return left**right


def _shift(left: int, right: int) -> int:
    _check(_bits(left) + max(right, 0), _MOST_BITS)
    return left << right


def _divided(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, (str, bytes)):  # % of text can give very long text
            raise NotPlainError("text cannot be formatted in a test")
        _check(max(_bits(left), _bits(right)), _MOST_DIVISION_BITS)
        return function(left, right)

    return checked


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _divided(operator.truediv),
    ast.FloorDiv: _divided(operator.floordiv),
    ast.Mod: _divided(operator.mod),
    ast.Pow: _power,
    ast.LShift: _shift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}


def _is(left: Any, right: Any) -> bool:
    """Copies have lost their identity: `is` means equality, of the same type."""
    return left is right or (type(left) is type(right) and left == right)


def _in(item: Any, values: Any) -> bool:
    """Of a range, only integers are looked up at once; anything else is compared with every number."""
    if type(values) is range and type(item) not in (int, bool):
        if not isinstance(item, (float, Fraction)):
            finite(values)
        elif item != item or abs(item) == math.inf or item != int(item):
            return False
        else:
            item = int(item)
    return item in values


COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: _is,
    ast.IsNot: lambda left, right: not _is(left, right),
    ast.In: _in,
    ast.NotIn: lambda left, right: not _in(left, right),
}


def finite(value: Any) -> Any:
    """The value, unless it is a range of very many numbers."""
    if type(value) is range:
        _check(len(value), _MOST_ITEMS)
    return value


def items_of(value: Any) -> list[Any]:
    """What iterating gives, at once and not without end."""
    return list(finite(value))


def _set(value: Any = ()) -> set[Any]:
    return set(hashable(items_of(value)))


def _dict(value: Any = (), **named: Any) -> dict[Any, Any]:
    pairs = list(value.items()) if isinstance(value, dict) else [tuple(pair) for pair in items_of(value)]
    hashable(pair[0] for pair in pairs)
    return {**dict(pairs), **named}


def _counter(value: Any = ()) -> dict[Any, int]:
    return dict(value) if isinstance(value, dict) else dict(Counter(hashable(items_of(value))))


def _fraction(value: Any = 0, below: Any = 1) -> Fraction:
    if isinstance(value, str):
        _check(len(value), 1000)
        if "e" in value.lower():
            _check(abs(int(value.lower().rpartition("e")[2])), 1000)
    return Fraction(value) / below


def _text(value: Any = "") -> str:
    return str(value)


def _round(value: Any, digits: Any = None) -> Any:
    if digits is not None:
        _check(abs(digits), 1000)
        _check(_bits(value), _MOST_DIVISION_BITS)
    return round(value, digits)


def _sum(values: Any, start: Any = 0) -> Any:
    total = start
    for value in items_of(values):
        if not isinstance(value, (int, float, complex, Fraction)):
            raise NotPlainError("a sum of what are no numbers")
        _bits(value)
        total = total + value
    return total


def _product(values: Any, start: Any = 1) -> Any:
    total = start
    for value in items_of(values):
        total = _multiply(total, value)
    return total


def _bounded(function: Callable[..., Any], most: int) -> Callable[..., Any]:
    def checked(*values: Any) -> Any:
        _check(max(_bits(value) for value in values), most)
        return function(*values)

    return checked


def _factorial(value: int) -> int:
    _check(value, 5000)
    return math.factorial(value)


def _combinations(many: int, few: int | None = None) -> int:
    _check(many, 5000)
    return math.perm(many, few)


def _print(*values: Any, **named: Any) -> None:
    """Nothing is printed."""


# Types stay types, for isinstance; what is called through them is in CONSTRUCTORS.
BUILTINS: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)},
    **{function.__name__: function for function in (abs, all, any, chr, len, max, min, ord, sorted, hash)},
    **{function.__name__: function for function in (bin, hex, oct, ascii, repr)},
    "isinstance": isinstance,
    "type": lambda value: type(value),
    "print": _print,
    "range": range,
    "reversed": lambda value: items_of(value)[::-1],
    "enumerate": lambda values, start=0: list(enumerate(items_of(values), start)),
    "zip": lambda *values, strict=False: list(zip(*map(items_of, values), strict=strict)),
    "map": lambda function, *values: list(map(function, *map(items_of, values))),
    "filter": lambda function, values: list(filter(function, items_of(values))),
    "next": lambda values, *default: next(iter(values), *default),
    "iter": items_of,
    "sum": _sum,
    "round": _round,
    "pow": _power,
    "divmod": _divided(divmod),
}
CONSTRUCTORS: dict[Any, Callable[..., Any]] = {
    set: _set,
    frozenset: lambda value=(): frozenset(_set(value)),
    dict: _dict,
    list: lambda value=(): items_of(value),
    tuple: lambda value=(): tuple(items_of(value)),
    str: _text,
    bytes: lambda value=b"": bytes(value) if not isinstance(value, int) else bytes(min(value, _MOST_ITEMS)),
}
ANSWERED = _words("len str repr next int float dict")
"""Builtins whose result an object of the program gives itself. The request holds no value of the test."""

ITERATING = _words("list tuple set frozenset sorted sum max min all any iter reversed enumerate zip map filter")
"""Builtins that iterate over their arguments: of an object of the program, over what `list` of it gives there."""

EXCEPTIONS = _words(
    "Exception ValueError TypeError KeyError IndexError ZeroDivisionError AttributeError RuntimeError OverflowError "
    "ArithmeticError LookupError NotImplementedError RecursionError AssertionError StopIteration NameError"
)

_MATH = (
    "fabs floor ceil trunc isnan isinf isfinite sqrt exp log log2 log10 sin cos tan asin acos atan atan2 hypot radians"
)
_RANDOM = "random randint randrange uniform choice choices sample shuffle gauss seed"


class BoundedRandom(random.Random):
    """Draws no more at a time than a test may hold."""

    def choices(self, population: Any, weights: Any = None, *, cum_weights: Any = None, k: int = 1) -> list[Any]:
        _check(k, _MOST_ITEMS)
        return super().choices(population, weights, cum_weights=cum_weights, k=k)

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        _check(k, _MOST_ITEMS)
        return super().sample(population, k, counts=counts)


def modules() -> dict[str, Any]:
    """What may be imported, new for each test: random numbers are the same each time."""
    chance = BoundedRandom(0)
    return {
        "math": {
            name: getattr(math, name) for name in f"{_MATH} radians degrees isclose pi e inf nan tau fsum dist".split()
        }
        | {name: _bounded(getattr(math, name), 4096) for name in ("gcd", "lcm", "isqrt")}
        | {"factorial": _factorial, "perm": _combinations, "prod": _product, "pow": math.pow}
        | {"comb": lambda many, few: _combinations(many, few) // _factorial(few)},
        "random": {name: getattr(chance, name) for name in _RANDOM.split()} | {"Random": BoundedRandom},
        "string": {name: getattr(string, name) for name in string.__all__ if isinstance(getattr(string, name), str)},
        "copy": {"copy": copy.copy, "deepcopy": copy.deepcopy},
        "collections": {"Counter": _counter, "OrderedDict": _dict},
        "fractions": {"Fraction": _fraction},
        "decimal": {"Decimal": _fraction},
        "typing": dict.fromkeys(("Any", "Dict", "List", "Optional", "Set", "Tuple", "Union")),
    }


def _join(between: str, values: Any) -> str:
    found = items_of(values)
    _check(len(between) * len(found) + sum(map(len, found)), _MOST_ITEMS)
    return between.join(found)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    _check(len(text) + (text.count(old) if old else len(text) + 1) * len(new), _MOST_ITEMS)
    return text.replace(old, new, count)


def _widened(name: str) -> Callable[..., str]:
    def checked(text: str, width: int, *fill: str) -> str:
        _check(width, _MOST_ITEMS)
        return getattr(text, name)(width, *fill)

    return checked


PREDICATES = _words(
    "startswith endswith isdigit isalpha isalnum isupper islower isspace isnumeric isdecimal istitle isidentifier "
    "isascii isprintable issubset issuperset isdisjoint is_integer"
)
"""Methods of plain values that only answer yes or no."""

METHODS: dict[type, frozenset[str]] = {
    str: PREDICATES - _words("issubset issuperset isdisjoint is_integer")
    | _words(
        "lower upper strip lstrip rstrip split rsplit splitlines join replace count find index rfind rindex title "
        "capitalize swapcase casefold partition rpartition removeprefix removesuffix encode center ljust rjust zfill"
    ),
    bytes: _words("decode hex startswith endswith count find index lower upper strip split"),
    list: _words("append extend insert pop remove sort reverse count index copy clear"),
    tuple: _words("count index"),
    dict: _words("get keys values items copy pop popitem setdefault update clear"),
    set: _words(
        "issubset issuperset isdisjoint union intersection difference symmetric_difference add remove discard copy "
        "pop clear update intersection_update difference_update symmetric_difference_update"
    ),
    int: _words("bit_length bit_count conjugate"),
    float: _words("is_integer hex conjugate"),
    complex: _words("conjugate"),
    BoundedRandom: _words(_RANDOM),
}
METHODS[frozenset] = METHODS[set]
_KINDS = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
PLAIN_NAMES = frozenset(name for kind in _KINDS for name in dir(kind) if not name.startswith("_"))
"""What plain values have as methods and attributes. An object with other ones is of a class of the program."""

_FIELDS = _words("real imag numerator denominator")
UNKNOWN_METHODS = PLAIN_NAMES - frozenset().union(*METHODS.values()) - _FIELDS
"""Methods of plain values that the host does not have."""
_SPECIAL: dict[tuple[type, str], Callable[..., Any]] = {
    (str, "join"): _join,
    (str, "replace"): _replace,
    **{(str, name): _widened(name) for name in ("center", "ljust", "rjust", "zfill")},
}


def attribute_of(value: Any, name: str) -> Any:
    """A method or field of a host value, or NotPlainError."""
    if name in _FIELDS and isinstance(value, (int, float, complex, Fraction)):
        return getattr(value, name)
    if name not in METHODS.get(type(value), ()):
        raise NotPlainError(f"no method {name} of {type(value).__name__} in a test")
    special = _SPECIAL.get((type(value), name))
    if special is not None:
        return lambda *values: special(value, *values)
    found = getattr(value, name)
    if name in ("keys", "values", "items"):
        return lambda: list(found())
    return found


def known_names() -> Iterator[str]:
    """The builtins that tests may use."""
    yield from BUILTINS
    yield from EXCEPTIONS
