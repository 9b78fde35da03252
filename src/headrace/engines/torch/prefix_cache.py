"""Keys and values of ended replies, for the next turn of their conversations."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

Ids = tuple[int, ...]

_RECENT = 256


class KeptCaches:
    """At most `tokens` of them, those used last. Nothing is kept before a first prompt continued a reply: many
    agents never do."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._recent: deque[Ids] = deque(maxlen=_RECENT)
        self._kept: OrderedDict[Ids, Any] = OrderedDict()
        self._held = 0
        self._wanted = False

    def ended(self, ids: Ids) -> bool:
        """A sequence with these tokens in its cache has ended; whether to keep that."""
        self._recent.append(ids)
        return self._wanted and len(ids) <= self._tokens

    def keep(self, ids: Ids, content: Any) -> None:
        """Let go of others if need be."""
        self._held += len(ids) - (len(ids) if self._kept.pop(ids, None) is not None else 0)
        self._kept[ids] = content
        while self._held > self._tokens:
            self._held -= len(self._kept.popitem(last=False)[0])

    def beginning_of(self, prompt: Ids) -> tuple[int, Any]:
        """(how many of the first tokens are kept, their content), of all that the prompt begins with the longest."""
        if not self._wanted:
            self._wanted = self._tokens > 0 and any(prompt[: len(ids)] == ids for ids in self._recent)
        found = max((ids for ids in self._kept if prompt[: len(ids)] == ids), key=len, default=())
        if not found:
            return 0, None
        self._kept.move_to_end(found)
        return len(found), self._kept[found]

    def forget(self) -> None:
        """The weights have changed, or the memory is wanted back."""
        self._recent.clear()
        self._kept.clear()
        self._held = 0
