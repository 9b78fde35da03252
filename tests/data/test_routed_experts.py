"""Experts of tokens as data: compact, exact through JSON and the ledger, and merged into rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.data.episode import Episode, ModelOutput, OwnedMessages, Step, Trajectory
from headrace.data.routing import RoutedExperts
from headrace.data.sample import Sample, merge_steps
from headrace.errors import DataError
from headrace.ledger import CallRecord, Ledger, digest
from ledger_data import Played, dispatch, play


def numbered(tokens: int, most: int = 100, first: int = 0, slots: int = 4) -> RoutedExperts:
    return RoutedExperts.of((np.arange(tokens * slots).reshape(tokens, 2, slots // 2) + first) % most)


def step(prompt: tuple[int, ...], response: tuple[int, ...], first: int = 0, routed: bool = True) -> Step:
    count, experts = len(response), numbered(len(prompt) + len(response) - 1, first=first) if routed else None
    return Step(prompt, response, (-0.5,) * count, (1,) * count, routed_experts=experts)


@pytest.mark.parametrize(("most", "width"), [(100, 1), (256, 1), (300, 2)])
def test_experts_take_a_byte_each_or_two_where_there_are_many(most: int, width: int) -> None:
    routed = numbered(80, most)
    assert (len(routed), routed.width, len(routed.experts)) == (80, width, 80 * 4 * width)
    assert RoutedExperts.from_json(routed.to_json()) == routed
    assert routed.rows(3, 5).array().tolist() == routed.array()[3:5].tolist()


@pytest.mark.parametrize("bad", [np.array([[-1, 2]]), np.array([[0.5]]), np.array([[70_000]]), np.empty((0, 2), int)])
def test_what_is_no_expert_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(DataError, match="experts must be numbers from 0 to 65535"):
        RoutedExperts.of(bad)


def test_a_row_for_every_token_but_the_last() -> None:
    assert step((1, 2), (3, 4)).routed_experts == numbered(3)
    with pytest.raises(DataError, match="routed_experts has 4 rows, but 4 tokens have 3"):
        Step((1, 2), (3, 4), routed_experts=numbered(4))
    with pytest.raises(DataError, match="ModelOutput: routed_experts has 4 rows"):
        ModelOutput("", (1, 2), (3, 4), (-1, -1), (), (0, 0), routed_experts=numbered(4))


def test_tokens_of_a_conversation_keep_the_experts_that_they_had_first() -> None:
    turns = (step((1, 2), (3, 4)), step((1, 2, 3, 4, 5), (6,), first=50))
    (row,) = merge_steps(Trajectory(turns))
    assert row.routed_experts is not None and row.tokens == (1, 2, 3, 4, 5, 6)
    # the fourth token was first read in the second turn
    expected = [*numbered(3).array().tolist(), *numbered(5, first=50).array().tolist()[3:]]
    assert row.routed_experts.array().tolist() == expected
    assert Sample.from_json(row.to_json()) == row
    (without,) = merge_steps(Trajectory((turns[0], step((1, 2, 3, 4, 5), (6,), routed=False))))
    assert without.routed_experts is None
    with pytest.raises(DataError, match="4 and 6 experts; were they of two models"):
        numbered(3).then(numbered(5, slots=6))


def test_wide_and_narrow_experts_go_together() -> None:
    both = numbered(3).then(numbered(5, most=300, first=280))
    assert both.array().tolist() == [*numbered(3).array().tolist(), *numbered(5, 300, 280).array().tolist()[3:]]


def conversation(turns: int) -> Played:
    prompt: tuple[int, ...] = (1, 2, 3)
    records: list[CallRecord] = []
    rng = np.random.default_rng(0)
    known = np.empty((0, 2, 48), np.uint8)
    for turn in range(turns):
        said = tuple(range(10 * turn, 10 * turn + 20))
        more = rng.integers(0, 128, (len(prompt) + len(said) - 1 - len(known), 2, 48), np.uint8)
        known = np.concatenate([known, more])
        routed = RoutedExperts.of(known)
        output = ModelOutput("said", prompt, said, (-0.5,) * 20, (-0.5,) * 20, (turn,) * 20, content="said", call=turn,
                             routed_experts=routed)  # fmt: skip
        asked = OwnedMessages(({"role": "user", "content": "hello"},))
        records.append(CallRecord(output, "agent", 5, digest(turn), asked, {}))
        prompt = (*prompt, *said, 7)
    steps = tuple(Step.from_model_output(one.output, one.messages) for one in records)
    changed = Step((1, 2), (3, 4), (-1.0, -1.0), (0, 0), routed_experts=numbered(3, most=300, first=290))
    episode = Episode("task 0", (Trajectory(steps), Trajectory((changed,), "own")))
    return Played(tuple(records), (), episode)


def test_the_ledger_gives_them_back_exactly_and_stores_those_of_earlier_turns_once(tmp_path: Path) -> None:
    sizes = {}
    for turns in (1, 30):
        played, folder = conversation(turns), tmp_path / str(turns)
        folder.mkdir()
        with Ledger.open(folder) as ledger:
            dispatch(ledger, 0)
            play(ledger, played)
            ledger.flush()
            assert ledger.group(0) == [played.episode]
            assert [record.output for record in ledger.calls(0, 0)] == [record.output for record in played.calls]
            sizes[turns] = ledger.size_bytes()
    own = 21 * 96  # bytes of what a turn adds
    assert 30 * own < sizes[30] - sizes[1] + own < 45 * own  # all turns in full would be fifteen times as much
