"""Episodes as columns: what SQLite can hold of them as it is, and what it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.data.episode import Episode
from headrace.ledger.pack import from_json, to_json

SUMMARY: Final = (
    "seed", "termination", "reward", "is_correct", "error", "metrics", "oldest_version", "newest_version",
    "generated_tokens",
)  # fmt: skip
_LARGEST = 2**63


def stored_text(value: Any) -> Any:
    """Text that is valid Unicode; half a surrogate pair, as in a file name of bytes, is written out as an escape."""
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def summary(episode: Episode) -> tuple[Any, ...]:
    """The values of SUMMARY."""
    versions = [step.versions for t in episode.trajectories for step in t.steps if step.versions]
    return (
        _stored_seed(episode.seed),
        stored_text(episode.termination),
        episode.reward,
        None if episode.is_correct is None else bool(episode.is_correct),
        stored_text(episode.error),
        stored_text(_metrics_text(episode.metrics)) if episode.metrics else None,
        min((min(found) for found in versions), default=None),
        max((max(found) for found in versions), default=None),
        episode.generated_tokens,
    )


def unstorable(episode: Episode, task_id: Any, source: Any) -> dict[str, Any]:
    """Fields of which the columns hold something else; `task_id` and `source` are what the columns of those hold."""
    stored = {
        "task_id": task_id,
        "source": source,
        "seed": _stored_seed(episode.seed),
        "termination": stored_text(episode.termination),
        "error": stored_text(episode.error),
        "is_correct": None if episode.is_correct is None else bool(episode.is_correct),
    }
    found = {name: getattr(episode, name) for name, value in stored.items() if getattr(episode, name) != value}
    if episode.metrics and stored_text(text := _metrics_text(episode.metrics)) != text:
        found["metrics"] = dict(episode.metrics)
    return found


def _metrics_text(metrics: Mapping[Any, Any]) -> str:
    plain = all(type(key) is str and type(value) is float for key, value in metrics.items())
    return to_json(dict(metrics), plain and "$exact" not in metrics)


def episode_fields(summary: dict[str, Any]) -> dict[str, Any]:
    """Fields of the Episode from the columns of its row, by name; those of its body come over them."""
    correct, metrics = summary["is_correct"], summary["metrics"]
    return {
        "seed": summary["seed"],
        "termination": summary["termination"],
        "error": summary["error"],
        "is_correct": None if correct is None else bool(correct),
        "metrics": from_json(metrics) if metrics else {},
    }


def _stored_seed(seed: Any) -> Any:
    return seed if isinstance(seed, int) and -_LARGEST <= seed < _LARGEST else None
