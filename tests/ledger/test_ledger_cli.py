"""`headrace ledger`: the account on a terminal, and episodes in a file."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import run
from headrace.data.episode import Episode
from headrace.ledger import Ledger, LedgerReader
from headrace.ledger.export import export_episodes
from ledger_data import dispatch, play, simple_episode, train

Caught = pytest.CaptureFixture[str]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four steps: of each one group trained; of the first, one episode failed; one group filtered."""
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "run"
    folder.mkdir()
    with Ledger.open(folder) as ledger:
        for step in range(4):
            dispatch(ledger, step, size=2, source="sums" if step % 2 else "words")
            play(ledger, simple_episode(step, 0))
            if step == 0:
                ledger.finished(replace(simple_episode(0, 1).episode, error="broke", termination="error"))
                ledger.decided(0, "whole", failed=1)
                train(ledger, 0, [0], size=1)
            else:
                play(ledger, simple_episode(step, 1))
                train(ledger, step, [step], size=2)
        dispatch(ledger, 4, size=1, source="sums")
        play(ledger, simple_episode(4))
        ledger.decided(4, "filtered", reason="uniform rewards", filtered=1)
        dispatch(ledger, 5, size=3, source="sums")
        ledger.evaluated(4, "held out", {"pass@1": 0.5}, [simple_episode(9).episode])
        ledger.batch(4, 4, [5])
    return folder


def test_the_account_is_printed_by_source_and_in_all(run_dir: Path, capsys: Caught):
    assert run(["ledger", str(run_dir)]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines()]
    assert ["sums", "8", "4", "1", "0", "0", "3"] in rows
    assert ["words", "4", "3", "0", "1", "0", "0"] in rows
    assert ["all", "12", "7", "1", "1", "0", "3"] in rows
    assert f"{os.getpid()} on " in out
    assert "batches trained: 4" in out and "the batch of step 5, 1 groups" in out
    assert "last weight sync: version 4 after step 4, digest 3" in out
    assert "evaluations: 1, the last of step 4" in out and "MB" in out


def test_a_unfinished_run_is_shown_as_running_and_a_killed_one_as_killed(run_dir: Path, capsys: Caught):
    with Ledger.open(run_dir):
        assert run(["ledger", str(run_dir)]) == 0
        assert "running" in capsys.readouterr().out
    code = "import os, sys; from headrace.ledger import *; l = Ledger.open(__import__('pathlib').Path(sys.argv[1]));"
    subprocess.run([sys.executable, "-c", f"{code} l.flush(); os._exit(9)", run_dir])
    assert run(["ledger", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "killed" in out and "running" not in out


def exported(words: list[str], out: Path) -> list[dict[str, Any]]:
    assert run(["ledger", *words, "--export", str(out)]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_episodes_are_exported_with_their_outcome(run_dir: Path, tmp_path: Path, capsys: Caught):
    rows = exported([str(run_dir)], tmp_path / "out.jsonl")
    assert capsys.readouterr().out == f"wrote 9 episodes to {tmp_path / 'out.jsonl'}\n"
    found = [(row["group_id"], row["decision"], row["reason"], row["step"]) for row in rows]
    assert found[:3] == [(0, "trained", None, 1), (0, "failed", None, 1), (1, "trained", None, 2)]
    assert found[-1] == (4, "filtered", "uniform rewards", 5)
    with LedgerReader.read(run_dir) as reader:
        for row in rows:
            own = {key: row[key] for key in Episode(task_id="").to_dict()}
            assert Episode.from_dict(own) == reader.group(row["group_id"])[row["rollout_idx"]]
    assert rows[0]["newest_version"] == 1 and rows[0]["reward"] == 0.0


def test_steps_and_kind_choose_what_is_exported(run_dir: Path, tmp_path: Path):
    def groups(*words: str) -> list[int]:
        return [row["group_id"] for row in exported([str(run_dir), *words], tmp_path / "out.jsonl")]

    assert groups("--steps", "2:3") == [1, 1, 2, 2]
    assert groups("--steps", "4:") == [3, 3, 4]
    assert groups("--steps", ":1") == [0, 0]
    assert len(exported([str(run_dir), "--kind", "eval", "--steps", "4:4"], tmp_path / "eval.jsonl")) == 1
    (evaluated,) = exported([str(run_dir / "ledger.sqlite"), "--kind", "eval"], tmp_path / "eval.jsonl")
    assert (evaluated["set"], evaluated["step"], evaluated["decision"]) == ("held out", 4, None)


def test_an_exported_line_is_json_whatever_was_said(tmp_path: Path):
    odd = replace(simple_episode(0).episode, metrics={"nan": float("nan")}, error="\ud800 ü \u2028")
    with Ledger.open(tmp_path) as ledger:
        dispatch(ledger, 0)
        ledger.finished(odd)
        export_episodes(ledger, tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    row = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert (row["metrics"], row["error"]) == ({"nan": None}, "\ud800 ü \u2028")


def test_parquet_holds_the_same(run_dir: Path, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = exported([str(run_dir)], tmp_path / "out.jsonl")
    assert run(["ledger", str(run_dir), "--export", str(tmp_path / "out.parquet")]) == 0
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        assert json.loads(row["metrics"]) == line["metrics"]
        ours, theirs = row["trajectories"][0]["steps"][0], line["trajectories"][0]["steps"][0]
        assert ours["logprobs"] == theirs["logprobs"] and ours["prompt_ids"] == theirs["prompt_ids"]
        assert json.loads(ours["messages"]) == theirs["messages"]
        assert [row[key] for key in ("decision", "reason", "reward")] == [
            line[key] for key in ("decision", "reason", "reward")
        ]


def test_without_pyarrow_it_says_what_to_install(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "headrace.ledger.parquet", raising=False)
    done = run_and_catch(["ledger", str(run_dir), "--export", str(tmp_path / "out.parquet")])
    assert 'pip install -e ".[parquet]" -c' in done and not list(tmp_path.glob("*out*"))


def run_and_catch(words: list[str]) -> str:
    """What a wrong command says, in one line."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert run(words) == 2
    assert said.getvalue().startswith("error: ") and said.getvalue().count("\n") == 1
    return said.getvalue()


def _newer(folder: Path) -> Path:
    Ledger.open(folder).close()
    with sqlite3.connect(folder / "ledger.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    return folder


def _notes(folder: Path) -> Path:
    (folder / "ledger.sqlite").write_text("notes " * 200)
    return folder


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no ledger": (lambda folder: [str(folder)], "there is no ledger"),
    "no folder": (lambda folder: [str(folder / "nowhere")], "there is no ledger"),
    "not a ledger": (lambda folder: [str(_notes(folder))], "not a ledger"),
    "newer": (lambda folder: [str(_newer(folder))], "has version 99"),
    "ending": (lambda folder: [str(_made(folder)), "--export", "a.csv"], ".jsonl or .parquet"),
    "steps": (lambda folder: [str(_made(folder)), "--export", "a.jsonl", "--steps", "4"], "--steps is A:B, A: or :B"),
    "steps backwards": (
        lambda folder: [str(_made(folder)), "--export", "a.jsonl", "--steps", "5:2"],
        "--steps 5:2 ends before it begins; give the smaller step first: 2:5",
    ),
    "nothing to choose": (lambda folder: [str(_made(folder)), "--kind", "eval"], "add --export FILE.jsonl"),
    "no such place": (
        lambda folder: [str(_made(folder)), "--export", str(folder / "no" / "a.jsonl")],
        "cannot write",
    ),
}


def _made(folder: Path) -> Path:
    Ledger.open(folder).close()
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(tmp_path: Path, mistake: str):
    words, says = MISTAKES[mistake]
    assert says in run_and_catch(["ledger", *words(tmp_path)])
