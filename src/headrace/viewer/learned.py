"""What training made of an episode's tokens, put under the tokens of its Steps."""

from __future__ import annotations

from typing import Any

from headrace.data.sample import ClipState
from headrace.ledger.episode_tokens import TokenRow, episode_tokens
from headrace.ledger.reader import LedgerReader
from headrace.ledger.records import EpisodeRecord

TokenColumns = dict[str, list[Any]]
"""Values by column, one per token of a reply, None where there is none."""

_STATES = {state.name.lower(): int(state) for state in ClipState}
_COLUMNS = {
    "trained": "trained",
    "advantage": "advantages",
    "learner_logprob": "learner_logprobs",
    "ratio": "ratios",
    "entropy": "entropies",
    "clip": "clip_states",
}


def learned_columns(reader: LedgerReader, record: EpisodeRecord | None) -> dict[tuple[int, int], TokenColumns]:
    """By the numbers of trajectory and Step. Empty if there are no tokens, or nothing is on record."""
    found: dict[tuple[int, int], TokenColumns] = {}
    if record is None or record.pruned:
        return found
    for row in episode_tokens(reader, record):
        for place, (step, sampled) in enumerate(zip(row.steps, row.sampled, strict=True)):
            if sampled:
                columns = found.setdefault((row.trajectory, step), {name: [] for name in _COLUMNS})
                for name, attribute in _COLUMNS.items():
                    columns[name].append(_value(name, row, attribute, place))
    return {
        place: {name: values for name, values in columns.items() if any(value is not None for value in values)}
        for place, columns in found.items()
    }


def _value(name: str, row: TokenRow, attribute: str, place: int) -> Any:
    value = getattr(row, attribute)[place]
    if name == "clip":
        return None if value is None else _STATES[value]
    return int(value) if name == "trained" and value is not None else value
