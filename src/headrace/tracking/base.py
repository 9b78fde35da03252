"""Tracker: where metrics go. TrackerSet passes them to several, and survives the failure of any of them."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headrace import registry
from headrace.errors import ConfigError
from headrace.tracking.terminal import Doing
from headrace.utils.usercode import contained

if TYPE_CHECKING:
    from headrace.engines.base import EngineHealth

log = logging.getLogger("headrace")

_PASS_AT_1 = re.compile(r"eval/(.+)/pass@1")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker may want to know before the first step."""

    name: str
    run_dir: Path
    total_steps: int
    config: dict[str, Any]
    resumed_from: int | None = None
    """The step that the run resumes from: later steps are tracked again. None for a new run."""


class Tracker(Protocol):
    """Receives the metrics of a run: `start` once, then `log` once per step and `message` at any time, then `close`."""

    def start(self, info: RunInfo) -> None:
        """Open files, draw the first view."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step; step 0 is the evaluation before training."""
        ...

    def message(self, text: str) -> None:
        """Take a line for people; trackers that keep only numbers ignore it."""
        ...

    def close(self) -> None:
        """Flush and release everything. May be called twice, and without `start`."""
        ...


class TrackerSet:
    """Several trackers as one. A tracker that raises is dropped with one warning; training continues."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @classmethod
    def from_names(cls, names: Iterable[str]) -> TrackerSet:
        """Look trackers up in the registry. An unknown name is an error here: a typo must not lose the metrics."""
        trackers: dict[str, Tracker] = {}
        for name in names:
            if name in trackers:
                raise ConfigError(f'tracker "{name}" is named twice, which would record everything twice; name it once')
            trackers[name] = registry.resolve("tracker", name)()
        return cls(trackers)

    def start(self, info: RunInfo) -> None:
        """Start every tracker."""
        self._each("start", lambda tracker: tracker.start(info))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of one step to every tracker."""
        self._each("log", lambda tracker: tracker.log(step, metrics))

    def message(self, text: str) -> None:
        """Pass a line for people to every tracker, and to the log."""
        log.info("%s", text)
        self._each("message", lambda tracker: tracker.message(text))

    def status(self, engine: EngineHealth) -> None:
        """Pass the engine's state to every tracker that shows it (an optional method `status`)."""
        self._each("status", lambda tracker: getattr(tracker, "status", lambda _: None)(engine))

    def progress(self, doing: Doing) -> None:
        """Pass what is being done to every tracker that shows it (an optional method `progress`)."""
        self._each("progress", lambda tracker: getattr(tracker, "progress", lambda _: None)(doing))

    def close(self) -> None:
        """Close and remove every tracker."""
        self._each("close", lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, doing: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                with contained(f'tracker "{name}"'):  # sys.exit in one must not end the run
                    call(tracker)
            except Exception as error:
                self._drop(name, doing, error)

    def _drop(self, name: str, doing: str, error: Exception) -> None:
        tracker = self._trackers.pop(name)
        with suppress(Exception), contained(f'tracker "{name}"'):
            tracker.close()  # it may hold the terminal or an open file
        what = f'tracker "{name}" failed in {doing}() with {type(error).__name__}: {error}; it is switched off'
        if isinstance(error, BrokenPipeError):
            what = "nobody reads the output any more"
        warnings.warn(f"{what} and training continues without it", RuntimeWarning, stacklevel=4)


def eval_sets(keys: Iterable[str]) -> list[str]:
    """Names of the evaluation sets among metric keys, in the order they come."""
    matches = (_PASS_AT_1.fullmatch(key) for key in keys)
    return list(dict.fromkeys(match[1] for match in matches if match))
