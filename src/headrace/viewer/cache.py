"""PageCache: pages as they were answered, so that several people who look at the same page cost one answer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

_MOST_BYTES = 64 << 20


class PageCache:
    """The newest answer to each question, with the revision of the run that it is of; the oldest are dropped."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most_bytes
        self._size = 0
        self._pages: OrderedDict[Hashable, tuple[Any, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, question: Hashable, revision: Any, answer: Callable[[], bytes]) -> bytes:
        """What is kept, if it is of this revision; else a new answer."""
        with self._lock:
            kept = self._pages.get(question)
            if kept is not None and kept[0] == revision:
                self._pages.move_to_end(question)
                return kept[1]
        page = answer()
        if len(page) * 4 < self._most:
            self._put(question, revision, page)
        return page

    def _put(self, question: Hashable, revision: Any, page: bytes) -> None:
        with self._lock:
            before = self._pages.pop(question, None)
            self._size += len(page) - (len(before[1]) if before else 0)
            self._pages[question] = (revision, page)
            while self._size > self._most:
                _, (_, dropped) = self._pages.popitem(last=False)
                self._size -= len(dropped)
