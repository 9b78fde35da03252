"""CallLog: what has changed the learners since their last checkpoint, so that new ranks can be brought to where the
lost ones were."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True, slots=True)
class Logged:
    """One call."""

    method: str
    arguments: tuple[Any, ...]


class CallLog:
    """Calls in the order that they were made, in an unnamed file: a run may go without a checkpoint for long.

    `mark` remembers a moment. Once a checkpoint of that moment is in its place, `saved` forgets what came before it.
    """

    def __init__(self) -> None:
        self.checkpoint: Path | None = None
        """Where replaying begins; None: at the model as the run began."""
        self._file = _unnamed_file()
        self._marked = 0

    def append(self, method: str, *arguments: Any) -> None:
        """A call that was made."""
        self._file.seek(0, 2)
        pickle.dump(Logged(method, arguments), self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def mark(self) -> None:
        """The state as it is now is being saved."""
        self._marked = self._file.seek(0, 2)

    def saved(self, folder: Path) -> None:
        """What was saved at the mark is at `folder` now."""
        self._file.seek(self._marked)
        later = self._file.read()
        self.restart(folder)
        self._file.write(later)

    def restart(self, folder: Path | None) -> None:
        """A checkpoint was loaded: what came before it does not matter any more."""
        self._file.close()
        self._file = _unnamed_file()
        self.checkpoint, self._marked = folder, 0

    def __iter__(self) -> Iterator[Logged]:
        self._file.seek(0)
        with suppress(EOFError):
            while True:
                yield pickle.load(self._file)

    def close(self) -> None:
        """Forget all."""
        self._file.close()


def _unnamed_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="headrace-calls-")
