"""A sample of a step's episodes, as rows for trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.data.episode import Episode
from headrace.tracking.base import EpisodeRow

_MOST_TEXT = 2000  # characters of a prompt or reply
COLUMNS = ("step", *EpisodeRow.__dataclass_fields__)


def sampled_rows(episodes: Sequence[Episode], count: int, run_dir: Path, viewer: str) -> list[EpisodeRow]:
    """So many episodes, evenly spread over all of them by reward: the best and the worst are among them."""
    ordered = sorted((one for one in episodes if not one.failed), key=lambda one: (one.reward, one.group_id))
    if len(ordered) > count:
        last = len(ordered) - 1
        places = [round(number * last / (count - 1)) for number in range(count)] if count > 1 else [last]
        ordered = [ordered[place] for place in places]
    return [_row(one, run_dir, viewer) for one in ordered[:count]]


def _row(episode: Episode, run_dir: Path, viewer: str) -> EpisodeRow:
    place = ("run", run_dir.name, "group", str(episode.group_id), "rollout", str(episode.rollout_idx))
    link = f"{viewer.rstrip('/')}/#/{'/'.join(quote(part, safe='') for part in place)}" if viewer else ""
    return EpisodeRow(
        episode.group_id, episode.rollout_idx, str(episode.task_id), episode.source, episode.reward, episode.is_correct,
        str(episode.termination), episode.generated_tokens, _cut(_prompt(episode)), _cut(episode.text), link,
    )  # fmt: skip


def _prompt(episode: Episode) -> str:
    first = next((step for t in episode.trajectories for step in t.steps), None)
    return "\n".join(f"{one.get('role')}: {one.get('content')}" for one in first.messages) if first else ""


def _cut(text: str) -> str:
    """Valid Unicode, and no more of it than a table shows."""
    said = text.encode("utf-8", "replace").decode("utf-8")
    return said if len(said) <= _MOST_TEXT else f"{said[:_MOST_TEXT]}…"


def table_row(step: int, row: EpisodeRow) -> list[Any]:
    """The values of COLUMNS."""
    return [step, *(getattr(row, name) for name in COLUMNS[1:])]


def flat_settings(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their full names, as services list them: `trainer.steps`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat_settings(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
