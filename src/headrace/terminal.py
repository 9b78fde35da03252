"""The console that everything for people is printed to."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """One whose reader may leave, as that of `| head` does: an error like any other, where rich would exit."""

    def on_broken_pipe(self) -> None:
        raise
