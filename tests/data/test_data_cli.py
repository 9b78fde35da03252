"""`headrace data inspect`, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli.data import _show
from headrace.cli.main import run
from headrace.data.report import Lengths, inspect_tasks
from headrace.data.task import Task

Caught = pytest.CaptureFixture[str]
ROWS = """{"question": "Capital of France?", "answer": "Paris"}
{"question": "capital of  france?", "answer": "Paris"}
{"question": 5}
{"question"
{"qestion": "x"}
{"question": "y", "id": "1"}
{"question": "Capital of Peru?", "answer": "Lima", "source": "south"}
"""
FILE = """
[data]
holdout = 1
system = "Be brief."
[data.mixture.capitals]
tasks = "rows.jsonl"
columns = { instruction = "question" }
weight = 3
[data.mixture.sums]
tasks = "reasoning_gym:chain_sum"
args = { size = 5 }
[eval.sets.dev]
tasks = "dev.jsonl"
[eval.sets.kept]
tasks = "holdout"
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)
    asked = ["Capital of France?", "Capital of Peru?", "Capital of Chile?"]
    Path("dev.jsonl").write_text("".join(json.dumps({"instruction": text}) + "\n" for text in asked))
    Path("run.toml").write_text(FILE)


def inspected(capsys: Caught, *words: str) -> dict[str, Any]:
    assert run(["data", "inspect", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_a_source_is_counted_and_its_bad_rows_are_all_reported(capsys: Caught) -> None:
    found = inspected(capsys, "rows.jsonl", "--columns", 'instruction = "question"')
    assert found["tasks"] == 3 and found["sources"] == {"default": 2, "south": 1} and found["with_answer"] == 3
    assert found["duplicates"] == 1 and found["duplicate_ids"] == [["1", "2"]]
    assert [row.split(": ")[0] for row in found["bad_rows"]] == [f"rows.jsonl, line {n}" for n in (3, 4, 5, 6)]
    assert found["characters"]["max"] == len("capital of  france?") and found["tokens"] is None
    assert [task["id"] for task in found["samples"]] == ["1", "7", "2"]


@pytest.mark.parametrize("args", ["size = 4", "{ size = 4, seed = 2 }"])
def test_a_source_gets_its_arguments(capsys: Caught, args: str) -> None:
    assert inspected(capsys, "reasoning_gym:chain_sum", "--args", args)["tasks"] == 4


def test_a_template_is_shown_as_the_model_is_asked(capsys: Caught) -> None:
    assert run(["data", "inspect", "rows.jsonl", "--template", "{question} Answer:"]) == 0
    assert "user: Capital of France? Answer:\nanswer: Paris\n" in capsys.readouterr().out


def test_a_run_file_shows_mixture_holdout_overlap_and_tokens(capsys: Caught) -> None:
    found = inspected(capsys, "run.toml")
    assert found["tasks"] + found["held_out"] == 8 and found["held_out"] >= 1
    assert found["draws"] == {"capitals": 0.75, "sums": 0.25}
    assert found["evaluation"]["dev"]["tasks"] == 3 and found["evaluation"]["dev"]["shared"] >= 1
    assert found["evaluation"]["kept"]["shared"] == 0 and len(found["bad_rows"]) == 4
    assert found["tokens"] is None or found["tokens"]["mean"] > 5
    assert found["samples"][0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_settings_go_over_a_run_file(capsys: Caught) -> None:
    found = inspected(capsys, "run.toml", "--data.mixture.sums.args.size", "9", "--data.holdout", "0",
                      "--eval.sets", "{}")  # fmt: skip
    assert found["tasks"] == 12 and found["held_out"] == 0 and found["evaluation"] == {}


def test_a_model_without_a_tokenizer_costs_only_the_tokens(capsys: Caught) -> None:
    assert run(["data", "inspect", "run.toml", "--model.name", "./nowhere"]) == 0
    assert "lengths in tokens are not known: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.jsonl"], "there is no task file nowhere.jsonl"),
        (["nowhere.toml"], "there is no run file nowhere.toml"),
        (["rows.jsonl"], "rows.jsonl has no tasks; 7 bad rows were left out: rows.jsonl, line 1: Task has no field"),
        (["rows.jsonl", "--args", "size"], "--args must be as in TOML"),
        (["rows.jsonl", "--data.holdout", "1"], "is a setting of a run file, and rows.jsonl is a source"),
        (["run.toml", "--args", "size = 1"], "--args is for a source, and run.toml is a run file; use --data.args"),
        (["run.toml", "--jsn"], 'did you mean "--json"?'),
        (["cuontdown"], 'did you mean "countdown"?'),
    ],
)
def test_a_mistake_is_one_line(capsys: Caught, words: list[str], says: str) -> None:
    assert run(["data", "inspect", *words]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.startswith("error: ") and err.count("\n") == 1 and out == ""


def test_it_is_plain_where_there_is_no_terminal_and_framed_where_there_is_one() -> None:
    report = inspect_tasks([Task("a[b]", instruction="word " * 300, answer="[bold]x")], bad_rows=["line 1: [red]"])
    shown = {}
    for terminal in (False, True):
        console = Console(width=60, force_terminal=terminal, color_system=None)
        with console.capture() as captured:
            _show(console, report, [])
        shown[terminal] = captured.get()
    assert "╭" not in shown[False] and "╭" in shown[True]
    assert "--- a[b] (default)\n" in shown[False] and "(1,500 characters)" in shown[False]
    assert all("[bold]x" in text and "[red]" in text for text in shown.values())


def test_lengths_are_those_of_all_tasks() -> None:
    assert Lengths.of([1, 2, 3, 10]) == Lengths(4.0, 2.5, pytest.approx(8.95), 10)  # type: ignore[arg-type]
