"""RoutedExperts: which experts of a mixture-of-experts model read each token, as the sampler chose them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from headrace.data.codec import JsonData
from headrace.errors import DataError

_TYPES = {1: "u1", 2: "<u2"}


@dataclass(frozen=True, slots=True)
class RoutedExperts(JsonData):
    """One row per token that was read: `slots` experts, layer after layer, as many of each layer as it routes to.

    Layers without experts have slots, too, which say nothing. The last token of a reply was never read, so n tokens
    have n - 1 rows. Kept as bytes, `width` of them for each expert: replies of large models have millions.
    """

    experts: bytes
    slots: int
    width: int = 1

    def __post_init__(self) -> None:
        if self.width not in _TYPES or self.slots < 1 or len(self.experts) % (self.slots * self.width):
            raise DataError(
                f"RoutedExperts: {len(self.experts)} bytes are no rows of {self.slots} experts of {self.width} bytes"
            )

    @classmethod
    def of(cls, experts: np.ndarray) -> Self:
        """From numbers [tokens, slots] or [tokens, layers, experts of each]."""
        numbers = np.issubdtype(experts.dtype, np.integer) and experts.size
        if not numbers or experts.min() < 0 or experts.max() >= 1 << 16:
            raise DataError(f"experts must be numbers from 0 to 65535, got {experts.dtype} {str(experts)[:80]}")
        flat = experts.reshape(len(experts), -1)
        width = 1 if flat.max() < 256 else 2
        return cls(flat.astype(_TYPES[width]).tobytes(), flat.shape[1], width)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.experts) // (self.slots * self.width)

    def array(self) -> np.ndarray:
        """Numbers [tokens, slots]."""
        return np.frombuffer(self.experts, _TYPES[self.width]).reshape(-1, self.slots)

    def rows(self, first: int = 0, end: int | None = None) -> Self:
        """Those of some tokens."""
        size = self.slots * self.width
        return type(self)(self.experts[first * size : None if end is None else end * size], self.slots, self.width)

    def then(self, later: RoutedExperts) -> RoutedExperts:
        """These rows, and those that another has beyond them: what was recorded first stays."""
        more = later.rows(len(self))
        if more.slots != self.slots:
            raise DataError(f"tokens of one row have {self.slots} and {more.slots} experts; were they of two models?")
        if more.width == self.width or not more.experts:
            return RoutedExperts(self.experts + more.experts, self.slots, self.width)
        return RoutedExperts.of(np.concatenate([self.array(), more.array()]))

    def shared(self, other: RoutedExperts | None) -> int:
        """How many rows both begin with."""
        if other is None or (other.slots, other.width) != (self.slots, self.width):
            return 0
        most = min(len(self), len(other))
        differ = np.flatnonzero((self.array()[:most] != other.array()[:most]).any(1))
        return int(differ[0]) if len(differ) else most

    def to_dict(self) -> dict[str, Any]:
        return {"experts": base64.b64encode(self.experts).decode(), "slots": self.slots, "width": self.width}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        try:
            return cls(base64.b64decode(values["experts"], validate=True), values["slots"], values.get("width", 1))
        except (KeyError, TypeError, binascii.Error) as error:
            raise DataError(f"RoutedExperts: {type(error).__name__}: {error}") from None


def require_routing(owner: str, routed: RoutedExperts | None, *tokens: Sequence[Any]) -> None:
    """Raise DataError unless there is a row for every token but the last."""
    count = sum(map(len, tokens))
    if routed is not None and len(routed) != count - 1:
        raise DataError(
            f"{owner}: routed_experts has {len(routed)} rows, but {count} tokens have {count - 1}: the last is not read"
        )
