"""`headrace eval`: models, runs, checkpoints and URLs; tables, files and pictures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_server import Answer, Received, Server, completion, serving
from fakes import ROOT
from headrace.cli.main import run
from headrace.engines import http
from headrace.evaluation.results_file import EvaluationResult, read_evaluation
from headrace.ledger import LedgerReader

Caught = pytest.CaptureFixture[str]

AGENT = """
def exact(task, text):
    return text == task.answer

def lenient(task, text):
    return task.answer in text

async def twice(task, model):
    await model.chat(task.messages)
    await model.chat([*task.messages, {"role": "user", "content": "Sure?"}])

def shares(episodes):
    return {"longest": max(len(e.text) for task in episodes for e in task), "count": sum(map(len, episodes))}

def breaks(episodes):
    return episodes[1000]

def says_text(episodes):
    return {"style": "good"}

def clashes(episodes):
    return {"pass@1": 1.0}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with twenty sums, an agent, and a run file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.01)
    rows = [{"id": f"t{i}", "instruction": f"{i}+1=", "answer": str(i + 1), "source": "ab"[i % 2]} for i in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.toml").write_text(
        '[workflow]\njudger = "agent.py:exact"\n[rollout]\nmax_tokens = 9\n[eval.sets.sums]\ntasks = "sums.jsonl"\n'
    )
    return tmp_path


def adds(asked: Received) -> Answer:
    """Right on every sum below ten."""
    number = int(asked.body["messages"][0]["content"].split("+")[0])
    return completion(str(number + 1) if number < 10 else "?", tokens=4)


def over(server: Server, *words: str) -> list[str]:
    return ["eval", "run.toml", "--url", f"{server.url}/v1", "--model", "adder", *words]


def figures(path: Path, name: str = "sums") -> dict[str, float]:
    return {found.name: found.metrics for found in read_evaluation(str(path)).sets}[name]


# ---- a model behind a URL --------------------------------------------------------------------------------------------


def test_a_url_is_evaluated_and_all_of_it_is_written(place: Path, capsys: Caught) -> None:
    with serving(adds) as server:
        code = run(over(server, "--json", "e.json", "--plot", "e.png", "--episodes", "e.jsonl"))
    out = capsys.readouterr().out
    assert code == 0, out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines()]
    assert ["sums", "", "20", "0.5000", "0.299 - 0.701", "0.5000", "4.0", "0"] in rows
    assert ["", "a", "10", "0.5000", "0.237 - 0.763", "0.5000", "4.0", "0"] in rows
    found = figures(place / "e.json")
    assert (found["tasks"], found["failed"], found["pass@1"], found["response_tokens"]) == (20, 0, 0.5, 4)
    assert (place / "e.png").read_bytes().startswith(b"\x89PNG")
    said = [json.loads(line) for line in (place / "e.jsonl").read_text().splitlines()]
    assert {(row["task_id"], row["text"], row["right"]) for row in said if row["task_id"] in ("t3", "t12")} == {
        ("t3", "4", True),
        ("t12", "?", False),
    }
    assert len(said) == 20 and "results: e.json" in out
    assert {asked.body["model"] for asked in server.asked} == {"adder"}


def test_one_request_in_ten_that_fails_is_reported_and_wrong(place: Path) -> None:
    def answer(asked: Received) -> Answer:
        number = int(asked.body["messages"][0]["content"].split("+")[0])
        if number % 10 == 3:
            return Answer({"error": {"message": "cannot be answered"}}, 400)
        return completion(str(number + 1))

    with serving(answer) as server:
        assert run(over(server, "--json", "e.json")) == 0
    found = figures(place / "e.json")
    assert (found["tasks"], found["failed"], found["pass@1"], found["reward"]) == (20, 2, 0.9, 0.9)
    failed = [score.id for score in read_evaluation("e.json").sets[0].tasks if score.failed]
    assert failed == ["t3", "t13"]


def test_each_set_has_its_own_settings(place: Path) -> None:
    (place / "run.toml").write_text(
        '[workflow]\njudger = "agent.py:exact"\n[eval]\nmetrics = ["agent.py:shares"]\n'
        '[eval.sets.plain]\ntasks = "sums.jsonl"\nlimit = 6\n'
        '[eval.sets.own]\ntasks = "sums.jsonl"\nlimit = 3\nattempts = 4\n'
        "temperature = 0.7\ntop_p = 0.8\nmax_tokens = 5\n"
        'workflow = "agent.py:twice"\njudger = "agent.py:lenient"\n'
    )
    with serving(lambda asked: completion(f"It is {adds(asked).body['choices'][0]['message']['content']}")) as server:
        assert run(over(server, "--json", "e.json", "--plot", "e.png")) == 0
    plain, own = figures(place / "e.json", "plain"), figures(place / "e.json", "own")
    assert (plain["tasks"], plain["pass@1"], plain["count"], plain["longest"]) == (6, 0.0, 6, len("It is 6"))
    assert (own["tasks"], own["pass@1"], own["pass@4"], own["count"]) == (3, 1.0, 1.0, 12)
    asked = [(a.body["temperature"], a.body["top_p"], a.body["max_tokens"]) for a in server.asked]
    assert asked == [(0.0, 1.0, 256)] * 6 + [(0.7, 0.8, 5)] * 24


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("breaks", r'metric "agent.py:breaks" failed: IndexError'),
        ("says_text", r'metric "agent.py:says_text": "style" must be a finite number, got \'good\''),
        ("clashes", r'metric "agent.py:clashes": there is a metric "pass@1" already'),
        ("missing", r'"agent.py" has no "missing"'),
    ],
)
def test_a_bad_metric_is_an_error_that_names_it(function: str, problem: str, place: Path, capsys: Caught) -> None:
    with serving(adds) as server:
        assert run(over(server, f"--eval.metrics=agent.py:{function}")) == 2
    assert re.search(problem, capsys.readouterr().err)


def test_a_server_that_lets_nobody_in_is_one_line(place: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDER_KEY", "sk-secret")
    with serving(lambda asked: Answer({"error": {"message": "wrong key"}}, 401)) as server:
        assert run(over(server, "--api-key-env", "ADDER_KEY")) == 2
    told = capsys.readouterr()
    assert "answered 401: wrong key" in told.err and told.err.count("\n") == 1
    assert "sk-secret" not in told.err + told.out
    assert server.asked[0].headers["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run.toml", "--url", "http://x"], "which model at http://x"),
        (["run.toml", "--api-key-env", "K"], "add --url"),
        (["run.toml", "--checkpoint", "c", "--model", "m"], "both say what to evaluate"),
        (["run.toml", "--checkpoint", "c"], "neither a checkpoint nor a run folder"),
        (["run.toml", "--plot", "e.gif"], "--plot must end in"),
        (["run.toml", "--json", "nowhere/e.json"], "there is no folder"),
        (["run.toml", "--jsno", "e.json"], 'did you mean "--json"?'),
        (["."], "neither a run folder nor a checkpoint"),
        (["run.toml", "--eval.sets.sums.judger_args.x", "1"], "eval.sets.sums.judger is empty"),
        (["run.toml", "--eval.sets.sums.top_p", "0.9"], "top_p = 0.9 has no effect"),
        (["run.toml", "--url", "http://x", "--model", "m", "--api-key-env", "NO_KEY"], "NO_KEY"),
        (["run.toml", "--url", "http://127.0.0.1:1/v1", "--model", "m"], "cannot reach http://127.0.0.1:1/v1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(words: list[str], problem: str, place: Path, capsys: Caught) -> None:
    assert run(["eval", *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_say_how_far_it_got(place: Path, number: signal.Signals) -> None:
    def answer(asked: Received) -> Answer:
        slow = int(asked.body["messages"][0]["content"].split("+")[0]) >= 5
        return Answer(adds(asked).body, takes_s=30.0 if slow else 0.0)

    with serving(answer) as server:
        command = [sys.executable, "-m", "headrace", *over(server, "--episodes", "e.jsonl")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        _wait_for(lambda: len(server.asked) == 20 and len((place / "e.jsonl").read_text().splitlines()) == 5)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert 'stopped in the set "sums" after 5 of 20 episodes; the episodes so far are in e.jsonl' in err
    assert "Traceback" not in err


def _wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if ready():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not happen within 20 s")


# ---- models, runs and checkpoints ------------------------------------------------------------------------------------

SMALL = ["--rollout.max_tokens=12", "--rollout.group_size=2", "--trainer.batch_size=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the bundled model that was evaluated before and after its two steps."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = [str(ROOT / "examples" / "countdown.toml"), f"--run-dir={folder}", *SMALL, "--trainer.steps=2"]
    sets = load_sets(ROOT / "examples" / "countdown.toml")
    counts = [f"--eval.sets.{name}.args.count=4" for name in sets]
    # a rate at which two steps are to be seen in what it says
    assert run(["train", *words, *counts, "--data.args.count=16", "--eval.every=0", "--optimizer.lr=0.05"]) == 0
    return folder


def load_sets(path: Path) -> list[str]:
    from headrace import load_config

    return list(load_config(path).eval.sets)


def recorded(run_dir: Path, step: int) -> dict[str, str]:
    """What was said in an evaluation while training."""
    with LedgerReader.read(run_dir) as reader:
        return {found.episode.task_id: found.episode.text for found in reader.episodes("eval", step, step + 1)}


def evaluated(place: Path, *words: str) -> tuple[dict[str, str], EvaluationResult]:
    """What is said in an evaluation now, and its figures."""
    said, figures = place / "e.jsonl", place / "e.json"
    assert run(["eval", *words, "--episodes", str(said), "--json", str(figures)]) == 0
    rows = [json.loads(line) for line in said.read_text().splitlines()]
    return {row["task_id"]: row["text"] for row in rows}, read_evaluation(str(figures))


def test_a_run_folder_and_its_checkpoint_say_what_training_ended_with(trained: Path, tmp_path: Path) -> None:
    (checkpoint,) = (trained / "checkpoints").iterdir()
    last = recorded(trained, 2)
    assert last != recorded(trained, 0)
    for place in (trained, checkpoint):
        said, result = evaluated(tmp_path, str(place))
        assert said == last
        assert [found.metrics for found in result.sets] == [
            found.metrics for found in read_evaluation(str(trained)).sets
        ]


def test_another_model_is_evaluated_on_the_sets_of_a_run(trained: Path, tmp_path: Path) -> None:
    said, result = evaluated(tmp_path, str(trained), "--model", "bundled")
    assert said == recorded(trained, 0) and result.of == "bundled"


def test_evaluating_changes_nothing_of_what_is_trained(tmp_path: Path) -> None:
    torch.set_num_threads(1)

    def losses(name: str, *words: str) -> list[dict[str, Any]]:
        path = str(ROOT / "examples" / "countdown.toml")
        small = [*SMALL, "--trainer.steps=2", "--data.args.count=16", "--run.deterministic=true"]
        assert run(["train", path, f"--run-dir={tmp_path / name}", *small, *words]) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        keys = ("reward/mean", "policy/grad_norm", "policy/loss", "tokens/generated")
        return [{key: row[key] for key in keys if key in row} for row in rows if "policy/grad_norm" in row]

    counts = [f"--eval.sets.{name}.args.count=2" for name in load_sets(ROOT / "examples" / "countdown.toml")]
    often = losses("often", "--eval.every=1", *counts)
    never = losses("never", "--eval.every=0", "--eval.sets={}")
    assert often == never and len(often) == 2 and len(often[0]) >= 3
