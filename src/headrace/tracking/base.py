"""Tracker: where metrics go. TrackerSet passes them to several, and survives the failure of any of them."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode of a step, as a row of a table. `link` leads into the viewer, if `track.viewer` is set."""

    group_id: int
    rollout_idx: int
    task_id: str
    source: str
    reward: float
    is_correct: bool | None
    termination: str
    tokens: int
    prompt: str
    reply: str
    link: str


class Tracker:
    """Where the metrics of a run go. A tracker of your own is a subclass that has `start` and `log`, and what else it
    needs; name it in the run file as `track.trackers = ["console", "my_package.module:MyTracker"]`.

    Called from the training process, one call at a time: `start` once, then `log` once per step, then `close`; the
    others in between. A call that raises ends the tracker with one warning, and training continues without it. A call
    that takes long holds training up: one that waits for the network belongs `InBackground`.
    """

    def start(self, info: RunInfo) -> None:
        """Open files, or a run at a service. `info.config` has all settings."""
        raise NotImplementedError(f"{type(self).__name__} must define start(info)")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step; step 0 is the evaluation before training. A value may be NaN or infinite."""
        raise NotImplementedError(f"{type(self).__name__} must define log(step, metrics)")

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Take a sample of the episodes that a step trained on: `track.episodes` of them."""

    def model(self, folder: Path, step: int) -> None:
        """Take the final model, an ordinary model folder; called where `track.upload_model` asks for it."""

    def message(self, text: str) -> None:
        """Take a line for people."""

    def status(self, engine: EngineHealth) -> None:
        """Take the engine's state, for those who show it live."""

    def progress(self, doing: Doing) -> None:
        """Take what is being done, for those who show it live."""

    def close(self) -> None:
        """Flush and release everything. May be called twice, and without `start`."""


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

    def episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Pass a sample of a step's episodes to every tracker that takes them."""
        self._each("episodes", lambda tracker: getattr(tracker, "episodes", lambda *_: None)(step, rows))

    def model(self, folder: Path, step: int) -> None:
        """Pass the final model to every tracker that takes it."""
        self._each("model", lambda tracker: getattr(tracker, "model", lambda *_: None)(folder, step))

    def status(self, engine: EngineHealth) -> None:
        """Pass the engine's state to every tracker that shows it: one of a user's may have no such method."""
        self._each("status", lambda tracker: getattr(tracker, "status", lambda _: None)(engine))

    def progress(self, doing: Doing) -> None:
        """Pass what is being done to every tracker that shows it."""
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
