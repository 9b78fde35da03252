"""`headrace show`: every level, off a terminal and on one, and text that attacks the terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.main import run
from headrace.cli.show import visible
from headrace.data.episode import Episode, ModelOutput, OwnedMessages, Step, Trajectory
from headrace.data.sample import ClipState, LearnerValues, TrainBatch, merge_steps
from headrace.ledger import Ledger

Caught = pytest.CaptureFixture[str]
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\u200b\r\x08\ud800 [red]no markup[/red] \u2028<script>"
_DOES_SOMETHING = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of one step: a group of two rollouts with hostile texts, and one that was filtered."""
    pieces = {"H": 72, "i": 105, "\n": 10, "\x1b[2J\u202e\x9b": 33}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    asked = OwnedMessages([{"role": "user", "content": HOSTILE}])
    ids = (72, 105, 10, 33)
    episodes = []
    with Ledger.open(tmp_path) as ledger:
        for group_id in (0, 1):
            ledger.dispatched(group_id, (0, group_id), f"task {HOSTILE}", HOSTILE, 2, 0)
            for rollout in (0, 1):
                said = ModelOutput(
                    HOSTILE, (1, 2), ids, (-0.5, -0.1, -2.0, -0.2), (-0.5,) * 4, (0,) * 4, content=HOSTILE
                )
                step = Step.from_model_output(said, asked)
                episode = Episode(
                    f"task {HOSTILE}", (Trajectory((step,), reward=float(rollout)),), group_id, rollout, source=HOSTILE,
                    is_correct=bool(rollout),
                )  # fmt: skip
                ledger.started(group_id, rollout, 0, 1)
                ledger.called(group_id, rollout, 0, said, role="agent", seed=1, request_digest="", messages=asked)
                ledger.resulted(
                    group_id, rollout, 0, 0, kind="tool", name=HOSTILE, request_digest="", payload={"said": HOSTILE}
                )
                ledger.finished(episode, 1.5)
                episodes.append(episode)
        rows = [
            row for episode in episodes[:2] for row in merge_steps(episode.trajectories[0], group_id=0)
        ]  # fmt: skip
        rows = [
            replace(row, rollout_idx=number, advantages=(0.0,) + (2.0 * number - 1,) * 4)
            for number, row in enumerate(rows)
        ]
        learned = LearnerValues(
            ((-0.5, -0.1, -1.0, -0.2),) * 2, ((0.25, 0.5, 1.0, 2.0),) * 2, ((0, 0, int(ClipState.CLIPPED), 0),) * 2
        )
        ledger.decided(0, "whole")
        ledger.batch(0, 0, [0], trained=[TrainBatch(tuple(rows), (1.0, 1.0), ((0, 1),), 2, learned=learned)])
        ledger.decided(0, "trained", step=0, trained=2)
        ledger.committed(0, 1)
        ledger.decided(1, "filtered", reason=f"all equal {HOSTILE}", step=0, filtered=2)
    return tmp_path


def shown(capsys: Caught, *words: object) -> str:
    assert run(["show", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_run_shows_its_account_and_steps(folder: Path, capsys: Caught) -> None:
    out = shown(capsys, folder)
    assert "4 dispatched, 2 trained, 2 filtered, 0 failed, 0 stale, 0 pending" in out
    assert re.search(r"^\s*1\s+0\s+1\s+made", out, re.M)


def test_a_step_shows_groups_with_rewards_and_reasons(folder: Path, capsys: Caught) -> None:
    out = shown(capsys, folder, 1)
    assert "step 1 of 1: trained version 0, 8 tokens trained" in out
    assert re.search(r"^\s*0\s+task .*trained\s+0\.500\s+0 1\s+8", out, re.M)
    assert "all equal" in out


def test_a_group_shows_its_rollouts_the_best_first(folder: Path, capsys: Caught) -> None:
    out = shown(capsys, folder, 1, 0)
    lines = [line.split()[:4] for line in out.splitlines() if "right" in line or "wrong" in line]
    assert lines == [["1", "1.000", "right", "1.000"], ["0", "0.000", "wrong", "-1.000"]]


def test_an_episode_lists_every_token_with_what_is_known_of_it(folder: Path, capsys: Caught) -> None:
    out = shown(capsys, folder, 1, 0, 1, "--tokens")
    (line,) = [line.split() for line in out.splitlines() if "clipped" in line]
    assert line[:2] == ["2", "10"] and line[-8:] == [
        "-2.000", "-1.000", "2.718", "1.000", "1.000", "clipped", "0", "yes",
    ]  # fmt: skip


@pytest.mark.parametrize("colour", ["advantage", "logprob", "learner_logprob", "ratio", "entropy", "clip", "version"])
def test_tokens_are_coloured_on_a_terminal_only(
    folder: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch, colour: str
) -> None:
    words = (folder, 1, 0, 1, "--colour", colour)
    assert "\x1b" not in shown(capsys, *words)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = shown(capsys, *words)
    assert "48;2;" in out and f"colour: {'clip state' if colour == 'clip' else colour.replace('_', ' ')}" in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;2;" not in shown(capsys, *words)


@pytest.mark.parametrize("words", [(), (1,), (1, 0), (1, 0, 0), (1, 0, 0, "--tokens"), (1, 0, 0, "--all")])
@pytest.mark.parametrize("how", ["text", "json"])
def test_nothing_that_was_said_does_anything_to_the_terminal(
    folder: Path, capsys: Caught, words: tuple[object, ...], how: str
) -> None:
    out = shown(capsys, folder, *words, *(["--json"] if how == "json" else []))
    assert not _DOES_SOMETHING.findall(out)
    if how == "text" and words[:2] == (1, 0):
        assert "[red]no markup[/red]" in out and r"\x1b]0;owned" in out
    if how == "json":
        json.loads(out)


def test_text_without_control_characters_stays_as_it_is() -> None:
    for text in ("plain", "äöü 漢字 😀 → ⏎\nnext", ""):
        assert visible(text) == text
    assert visible("\x1b[0m\t\x00") == r"\x1b[0m\t\x00"


def test_long_messages_are_cut_unless_all_is_asked_for(tmp_path: Path, capsys: Caught) -> None:
    long = "x" * 1_000_000
    said = ModelOutput("ok", (1,), (2,), (-0.5,), (-0.5,), (0,), content="ok")
    asked = OwnedMessages([{"role": "user", "content": long}])
    with Ledger.open(tmp_path) as ledger:
        ledger.dispatched(0, (0, 0), "t", "s", 1, 0)
        ledger.started(0, 0, 0, 1)
        ledger.called(0, 0, 0, said, role="agent", seed=1, request_digest="", messages=asked)
        ledger.finished(Episode("t", (Trajectory((Step.from_model_output(said, asked),), reward=1.0),)), 1.0)
        ledger.decided(0, "filtered", reason="x", step=0, filtered=1)
    out = shown(capsys, tmp_path, 1, 0, 0)
    assert len(out) < 20_000 and "1,000,000 characters in all; --all shows them" in out
    assert shown(capsys, tmp_path, 1, 0, 0, "--all").count("x") > 1_000_000 - 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((9,), "step 9 is not on record"),
        ((1, 7), "group 7 is not on record"),
        ((2, 0), "group 0 is not of step 2, it is of step 1"),
        ((1, 0, 5), "has no rollout 5"),
        ((1, 0, "--tokens"), "--tokens is about the tokens of an episode; name one"),
    ],
)
def test_what_is_not_there_is_one_line_with_a_remedy(
    folder: Path, capsys: Caught, words: tuple[object, ...], said: str
) -> None:
    assert run(["show", str(folder), *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_another_folder_is_refused(tmp_path: Path, capsys: Caught) -> None:
    assert run(["show", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
