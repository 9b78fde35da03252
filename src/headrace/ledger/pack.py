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
from typing import Any, Final

from headrace.errors import LedgerError

_EXACT = "$exact"
_RAW, _DEFLATED, _SEALED = b"\0", b"\1", b"C"
_WORTH_DEFLATING = 1024  # bytes; below, what is saved is not worth the time
_LENGTH = struct.Struct("<I")
MOST_BYTES: Final = 1 << 29
"""Of one body. A larger one is not written, so one that inflates to more was not written by this program."""
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
    require_sane(sum(lengths[::2]))
    pairs = zip(lengths[::2], lengths[1::2], strict=True)
    return tuple(value for count, value in pairs for _ in range(count))


def require_sane(numbers: int) -> None:
    """Refuse run lengths that stand for more numbers than a body can hold, before they are expanded."""
    if numbers > MOST_BYTES // 8:
        raise DamagedRecordError(f"it stands for {numbers} numbers, and {MOST_BYTES // 8} is the most")


class DamagedRecordError(LedgerError):
    """A record that this program cannot have written. `why` says what is wrong with it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a record in the ledger is damaged: {why}; put ledger.sqlite back from a copy")
        self.why = why


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

    def numbers(self, packed: array[Any]) -> int:
        """Add numbers in the form that they are stored in."""
        return self._add((), packed)

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
    size = _LENGTH.size + len(head) + sum(map(len, arrays))
    if size > MOST_BYTES:
        raise LedgerError(
            f"the ledger cannot record {size} bytes as one record, {MOST_BYTES} is the most; make messages, results "
            "or batches smaller, or set ledger.enabled = false"
        )
    plain = b"".join((_LENGTH.pack(len(head)), head, *arrays))
    if len(plain) >= _WORTH_DEFLATING:
        window, memory = (12, 5) if len(plain) < _SMALL else (15, 8)
        deflater = zlib.compressobj(1, zlib.DEFLATED, -window, memory)
        deflated = deflater.compress(plain) + deflater.flush()
        if len(deflated) < len(plain):
            return _DEFLATED + deflated
    return _RAW + plain


def seal(body: bytes, *key: Any) -> bytes:
    """The body with a checksum of itself and of `key`: columns of its row that would change what it means."""
    return _SEALED + _LENGTH.pack(_checksum(body, key)) + body


def unseal(sealed: Any, *key: Any) -> bytes:
    """The inverse of `seal`; raises if body or key are not as they were. Older programs wrote bodies without a seal."""
    if not isinstance(sealed, bytes) or sealed[:1] not in (_RAW, _DEFLATED, _SEALED):
        raise DamagedRecordError("it is not a body")
    if sealed[:1] != _SEALED:
        return sealed
    body = sealed[1 + _LENGTH.size :]
    if sealed[1 : 1 + _LENGTH.size] != _LENGTH.pack(_checksum(body, key)):
        raise DamagedRecordError("its checksum differs")
    return body


def _checksum(body: bytes, key: tuple[Any, ...]) -> int:
    return zlib.crc32(body, zlib.crc32("\0".join(map(str, key)).encode("utf-8", "surrogatepass")))


def unpack(body: bytes) -> tuple[Any, list[tuple[Any, ...]]]:
    """The value and the arrays of a body."""
    try:
        return _unpacked(_inflated(body))
    except (zlib.error, struct.error, ValueError, TypeError, LookupError, RecursionError) as error:
        raise DamagedRecordError(f"{type(error).__name__}: {error}") from error


def _inflated(body: bytes) -> bytes:
    """Never more than MOST_BYTES, whatever the body says."""
    if body[:1] != _DEFLATED:
        return body[1:]
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    plain = inflater.decompress(memoryview(body)[1:], MOST_BYTES)
    if inflater.unconsumed_tail and inflater.decompress(inflater.unconsumed_tail, 1):
        raise DamagedRecordError(f"its {len(body)} bytes inflate to more than {MOST_BYTES}")
    if not inflater.eof:
        raise DamagedRecordError("it is cut off")
    return plain


def _unpacked(plain: bytes) -> tuple[Any, list[tuple[Any, ...]]]:
    place = _LENGTH.size + _LENGTH.unpack_from(plain)[0]
    value, described = from_json(plain[_LENGTH.size : place].decode("utf-8", "surrogatepass"))
    arrays: list[tuple[Any, ...]] = []
    for item in described:
        if not isinstance(item, str):
            arrays.append(tuple(item))
            continue
        found = array(item[0])
        size = int(item[1:]) * found.itemsize
        if place + size > len(plain):
            raise DamagedRecordError(f"an array of {size} bytes is cut off")
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
