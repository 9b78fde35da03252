"""Values and arrays as bytes that give exactly the same values again: every float to the bit."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from headrace.errors import LedgerError

_EXACT = "$exact"
_RAW, _DEFLATED = b"\0", b"\1"
_WORTH_DEFLATING = 1024  # bytes; below, what is saved is not worth the time
_LENGTH = struct.Struct("<I")
_SMALL = 1 << 13  # bytes, up to which a window of 4 KB does, which is set up three times faster than one of 32 KB
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def digest(*parts: Any) -> str:
    """A short digest of what was asked: equal for equal requests, in this process or another."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


# ---- JSON ------------------------------------------------------------------------------------------------------------


def to_json(value: Any, plain: bool = False) -> str:
    """JSON that `from_json` turns into an equal value; tuples, bytes and keys that are no text are spelled out.

    Nothing is to be spelled out in what is `plain`: texts, numbers, lists and dictionaries of known keys.
    """
    try:
        text = _ENCODER.encode(value)
        if plain or (json.loads(text) == value and not _looks_exact(value)):
            return text
    except (TypeError, ValueError):
        pass  # spelled out below, or refused there
    return _ENCODER.encode({_EXACT: _spelled(value)})


def from_json(text: str) -> Any:
    """The inverse of `to_json`."""
    value = json.loads(text)
    return _unspelled(value[_EXACT]) if _looks_exact(value) else value


def _looks_exact(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and _EXACT in value


def _spelled(value: Any) -> Any:
    """Everything that is no scalar as {kind: content}, so that no kind is mistaken for another."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_spelled(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_spelled(key), _spelled(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # a scalar of numpy
        return _spelled(value.item())
    raise LedgerError(
        f"the ledger cannot record {value!r:.80}, a {type(value).__name__}: it holds text, numbers, lists and "
        "dictionaries; use those in messages and results, or set ledger.enabled = false"
    )


def _unspelled(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {_unspelled(key): _unspelled(item) for key, item in content}
    items = [_unspelled(item) for item in content]
    return items if kind == "list" else tuple(items)


# ---- arrays ----------------------------------------------------------------------------------------------------------


def runs(values: Sequence[Any]) -> tuple[Any, ...]:
    """Run lengths: (count, value, count, value, …). The versions of a response are mostly one value."""
    if values and values.count(values[0]) == len(values):
        return len(values), values[0]
    return tuple(item for value, same in groupby(values) for item in (sum(1 for _ in same), value))


def expand(lengths: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse of `runs`."""
    pairs = zip(lengths[::2], lengths[1::2], strict=True)
    return tuple(value for count, value in pairs for _ in range(count))


def same_floats(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> bool:
    """Whether they are equal to the bit: 0.0 is not -0.0."""
    if ours is theirs:
        return True
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    try:
        return array("d", ours).tobytes() == array("d", theirs).tobytes()
    except TypeError:  # no numbers
        return False


def _integers(values: Sequence[Any]) -> array[Any] | None:
    """In as few bytes as the largest needs; None if they are not all integers (an image among the tokens)."""
    for code in "HIq":
        try:
            return array(code, values)
        except OverflowError:
            continue
        except TypeError:
            return None
    return None


def _floats(values: Sequence[Any]) -> array[Any] | None:
    """In single precision where that is exact, as it is for what torch computed; None if they are no numbers."""
    try:
        single = array("f", values)
        return single if single.tolist() == list(values) else array("d", values)
    except (TypeError, OverflowError):
        return None


class Packer:
    """Collects the arrays of one body; each is named by its number, which goes into the body's JSON."""

    def __init__(self) -> None:
        self._described: list[Any] = []
        self._arrays: list[bytes] = []

    def integers(self, values: Sequence[Any]) -> int:
        """Add token ids or versions."""
        return self._add(values, _integers(values))

    def floats(self, values: Sequence[Any]) -> int:
        """Add log-probabilities or advantages."""
        return self._add(values, _floats(values))

    def _add(self, values: Sequence[Any], packed: array[Any] | None) -> int:
        if packed is None:
            self._described.append(list(values))
        else:
            if sys.byteorder == "big":
                packed.byteswap()
            self._described.append(f"{packed.typecode}{len(packed)}")
            self._arrays.append(packed.tobytes())
        return len(self._described) - 1

    def packed(self, value: Any, plain: bool = False) -> bytes:
        """The body: `value` as JSON, then the arrays, deflated if that helps. For `plain` see `to_json`."""
        spelled = len(self._arrays) < len(self._described)  # an array that is not all numbers is among the JSON
        return pack_bytes(to_json([value, self._described], plain and not spelled), *self._arrays)


def pack_bytes(text: str, *arrays: bytes) -> bytes:
    """Length of the text, text, arrays; the first byte says whether they are deflated."""
    head = text.encode("utf-8", "surrogatepass")
    plain = b"".join((_LENGTH.pack(len(head)), head, *arrays))
    if len(plain) >= _WORTH_DEFLATING:
        window, memory = (12, 5) if len(plain) < _SMALL else (15, 8)
        deflater = zlib.compressobj(1, zlib.DEFLATED, -window, memory)
        deflated = deflater.compress(plain) + deflater.flush()
        if len(deflated) < len(plain):
            return _DEFLATED + deflated
    return _RAW + plain


def unpack(body: bytes) -> tuple[Any, list[tuple[Any, ...]]]:
    """The value and the arrays of a body."""
    plain = zlib.decompress(body[1:], -zlib.MAX_WBITS) if body[:1] == _DEFLATED else body[1:]
    place = _LENGTH.size + _LENGTH.unpack_from(plain)[0]
    value, described = from_json(plain[_LENGTH.size : place].decode("utf-8", "surrogatepass"))
    arrays: list[tuple[Any, ...]] = []
    for item in described:
        if not isinstance(item, str):
            arrays.append(tuple(item))
            continue
        found = array(item[0])
        size = int(item[1:]) * found.itemsize
        found.frombytes(plain[place : place + size])
        place += size
        if sys.byteorder == "big":
            found.byteswap()
        arrays.append(tuple(found))
    return value, arrays


def pack_value(value: Any) -> bytes:
    """A value without arrays."""
    return pack_bytes(to_json([value, []]))


def unpack_value(body: bytes) -> Any:
    """The inverse of `pack_value`."""
    return unpack(body)[0]
