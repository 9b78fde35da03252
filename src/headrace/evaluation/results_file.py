"""What an evaluation found, task by task: written by `headrace eval --json`, read from there or from a run's ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.data.codec import JsonData
from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import ConfigError, DataError, boundary
from headrace.evaluation.evaluator import is_right
from headrace.ledger import LedgerReader

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TaskScore(JsonData):
    """One task: so many attempts, of which so many were right, and so many failed (which is wrong).

    `digest` identifies what was asked; None where it is not known.
    """

    id: str
    source: str
    attempts: int
    correct: int
    failed: int
    reward: float
    digest: str | None = None

    @property
    def share(self) -> float:
        """Share of right attempts."""
        return self.correct / self.attempts


@dataclass(frozen=True, slots=True)
class SetResult(JsonData):
    """One evaluation set."""

    name: str
    metrics: dict[str, float]
    tasks: tuple[TaskScore, ...]


@dataclass(frozen=True, slots=True)
class EvaluationResult(JsonData):
    """An evaluation of all sets. `of` names what was evaluated."""

    of: str
    sets: tuple[SetResult, ...]


@dataclass(frozen=True, slots=True)
class _Attempt:
    task_id: str
    source: str
    right: bool
    failed: bool
    reward: float


def set_result(
    name: str, metrics: Mapping[str, float], tasks: Sequence[Task], episodes: Sequence[Episode]
) -> SetResult:
    """The result of one set, as the evaluator hands it out."""
    digests = {task.id: task_digest(task) for task in tasks}
    attempts = (_Attempt(e.task_id, e.source, is_right(e), e.failed, 0.0 if e.failed else e.reward) for e in episodes)
    return SetResult(name, dict(metrics), tuple(_scores(attempts, digests)))


def task_digest(task: Task) -> str:
    """What identifies a task's content: ids alone may be line numbers of different files."""
    packed = json.dumps([list(task.messages), task.answer], sort_keys=True, default=repr)
    return hashlib.blake2b(packed.encode(errors="replace"), digest_size=8).hexdigest()


def write_evaluation(result: EvaluationResult, path: Path) -> None:
    """One JSON file."""
    with boundary(ConfigError, f"cannot write {path}", OSError):
        path.write_text(json.dumps({"headrace_evaluation": FORMAT, **result.to_dict()}, indent=1) + "\n")


def read_evaluation(source: str) -> EvaluationResult:
    """From a JSON file of `headrace eval`, or RUN_DIR (its newest evaluation), or RUN_DIR@STEP."""
    path = Path(source)
    if path.is_file() and path.name != "ledger.sqlite":
        return _read_file(path)
    if path.exists():
        return _read_ledger(path, None)
    folder, at, step = source.rpartition("@")
    if at and step.isdecimal() and Path(folder).exists():
        return _read_ledger(Path(folder), int(step))
    raise ConfigError(f"there is no {source}; give a file of headrace eval --json, a run folder, or RUN_DIR@STEP")


def _read_file(path: Path) -> EvaluationResult:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of headrace eval --json: {error}") from None
    found = values.pop("headrace_evaluation", None) if isinstance(values, dict) else None
    if found != FORMAT:
        raise ConfigError(f"{path} is no file of headrace eval --json (format {FORMAT}), its format is {found!r}")
    try:
        return EvaluationResult.from_dict(values)
    except DataError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _read_ledger(run: Path, step: int | None) -> EvaluationResult:
    with LedgerReader.read(run) as reader:
        evaluations = reader.evaluations()
        steps = sorted({found.step for found in evaluations})
        if not steps:
            raise ConfigError(f"{run} has no evaluation on record; evaluate it with headrace eval {run} --json FILE")
        if step is not None and step not in steps:
            raise ConfigError(f"{run} was not evaluated at step {step}, but at {', '.join(map(str, steps))}")
        chosen = steps[-1] if step is None else step
        attempts: dict[str, list[_Attempt]] = {}
        for record in reader.episodes("eval", chosen, chosen + 1):
            attempts.setdefault(record.decision, []).append(_recorded(record.episode, record.reward))
    sets = tuple(
        SetResult(found.name, found.metrics, tuple(_scores(attempts.get(found.name, []), {})))
        for found in evaluations
        if found.step == chosen
    )
    return EvaluationResult(f"{run}, step {chosen}", sets)


def _recorded(episode: Episode, reward: float) -> _Attempt:
    """Of an old episode only the metrics may be left."""
    right = not episode.failed and (reward >= 1.0 if episode.is_correct is None else episode.is_correct)
    return _Attempt(str(episode.task_id), episode.source, right, episode.failed, 0.0 if episode.failed else reward)


def _scores(attempts: Iterable[_Attempt], digests: Mapping[str, str]) -> Iterator[TaskScore]:
    by_task: dict[str, list[_Attempt]] = {}
    for attempt in attempts:
        by_task.setdefault(attempt.task_id, []).append(attempt)
    for task_id, made in by_task.items():
        yield TaskScore(
            id=task_id,
            source=made[0].source,
            attempts=len(made),
            correct=sum(a.right for a in made),
            failed=sum(a.failed for a in made),
            reward=sum(a.reward for a in made) / len(made),
            digest=digests.get(task_id),
        )


def curve(metrics: Mapping[str, Any], prefix: str = "") -> list[tuple[int, float]]:
    """(k, pass@k) of a set or, with a prefix, of one of its sources."""
    start = f"{prefix}pass@"
    found = {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start)}
    return sorted((int(k), value) for k, value in found.items() if k.isdecimal())


def sources(metrics: Mapping[str, Any]) -> list[str]:
    """Sources that a set reports apart."""
    return sorted({key.removesuffix("/pass@1") for key in metrics if key.endswith("/pass@1")})
