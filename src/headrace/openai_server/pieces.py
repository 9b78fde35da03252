"""Text of a reply while it is being sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_PART = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer shows for some of the bytes of a character
THINK = "<think>"


class TextPieces:
    """Tokens in, text out: only whole characters, and nothing that may turn out to begin a stop string.

    Tokens are decoded together with those before them: some tokenizers drop the space at the beginning.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._ids: list[int] = []
        self._begin = self._read = 0
        self._held = ""
        self._stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._ids += ids
        before, now = (self._decode(self._ids[self._begin : end]) for end in (self._read, len(self._ids)))
        if now.endswith(_PART):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return self._certain(self._held + now[len(before) :])

    def _certain(self, text: str) -> str:
        """The text up to a stop string, or up to what may become one."""
        if self._stopped:
            return ""
        found = [at for at in (text.find(word) for word in self._stop) if at >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, word) for word in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def may_think(text: str) -> bool:
    """Whether a reply begins with its reasoning, or may be about to: only its end says what is which."""
    begun = text.lstrip()
    return begun.startswith(THINK) or THINK.startswith(begun)


def _overlap(text: str, word: str) -> int:
    """Length of the longest beginning of the word, short of all of it, that the text ends with."""
    longest = min(len(text), len(word) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
