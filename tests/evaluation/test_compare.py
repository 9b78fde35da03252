"""Two evaluations compared: paired by task, with an interval that means what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.main import run
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.task import Task
from headrace.errors import ConfigError
from headrace.evaluation.compare import compare, difference, sign_test
from headrace.evaluation.results_file import (
    EvaluationResult,
    SetResult,
    TaskScore,
    read_evaluation,
    set_result,
    task_digest,
    write_evaluation,
)
from headrace.ledger import Ledger

Caught = pytest.CaptureFixture[str]


def score(task_id: str, correct: int, attempts: int = 1, source: str = "default", **more: Any) -> TaskScore:
    return TaskScore(task_id, source, attempts, correct, 0, correct / attempts, **more)


def result(*scores: TaskScore, of: str = "a model", name: str = "dev") -> EvaluationResult:
    return EvaluationResult(of, (SetResult(name, {"pass@1": 0.0}, scores),))


def episode(task_id: str, right: bool, source: str = "default", error: str | None = None) -> Episode:
    step = Step((1,), (2,), (-1.0,), (0,), text="x")
    trajectory = Trajectory((step,), reward=float(right))
    return Episode(task_id, (trajectory,), group_id=int(task_id), source=source, is_correct=right, error=error)


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "worse", "p_value"),
    [(0, 0, 1.0), (5, 5, 1.0), (5, 0, 0.0625), (6, 0, 0.03125), (0, 6, 0.03125), (15, 5, 0.041389), (9, 1, 0.021484)],
)
def test_the_sign_test_has_the_values_of_the_binomial_tables(better: int, worse: int, p_value: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p_value, abs=1e-6)


def test_the_difference_is_paired_by_task_whatever_the_order() -> None:
    first = result(score("a", 0), score("b", 1), score("c", 1), score("d", 0))
    second = result(score("d", 1), score("c", 1), score("b", 0), score("a", 1))
    (found,) = compare(first, second)
    assert (found.first, found.second, found.difference, found.tasks) == (0.5, 0.75, 0.25, 4)
    assert (found.better, found.worse, found.same) == (2, 1, 1)
    assert found.low <= 0.25 <= found.high and found.p_value == 1.0
    (turned,) = compare(second, first)
    assert (turned.difference, turned.better, turned.worse) == (-0.25, 1, 2)


def test_attempts_may_differ_in_number() -> None:
    (found,) = compare(result(score("a", 1, 4), score("b", 2, 4)), result(score("a", 1, 2), score("b", 1, 2)))
    assert (found.first, found.second, found.better, found.same) == (0.375, 0.5, 1, 1)


def test_sources_are_compared_apart_if_there_are_several() -> None:
    first = result(score("a", 0, source="easy"), score("b", 0, source="hard"))
    second = result(score("a", 1, source="easy"), score("b", 0, source="hard"))
    assert [(found.source, found.difference) for found in compare(first, second)] == [
        (None, 0.5),
        ("easy", 1.0),
        ("hard", 0.0),
    ]


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    cases, tasks, attempts = 300, 80, 2
    covered, lengths, unpaired = 0, [], []
    for case in range(cases):
        ability = rng.uniform(0.05, 0.85, tasks)  # tasks differ much more than models do: that is why they are paired
        gain = 0.1
        before, after = rng.binomial(attempts, ability), rng.binomial(attempts, ability + gain)
        pairs = [
            (score(str(i), int(b), attempts), score(str(i), int(a), attempts))
            for i, (b, a) in enumerate(zip(before, after, strict=True))
        ]
        found = difference("dev", None, pairs, seed=case)
        covered += found.low <= gain <= found.high
        lengths.append(found.high - found.low)
        unpaired.append(2 * 1.96 * np.sqrt(np.var(before / attempts) / tasks + np.var(after / attempts) / tasks))
    assert 0.91 <= covered / cases <= 0.98
    assert np.mean(lengths) < 0.9 * np.mean(unpaired)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_task_lists_that_differ_are_refused_unless_what_is_common_is_asked_for() -> None:
    first, second = result(score("a", 0), score("b", 1)), result(score("b", 1), score("c", 1), score("d", 0))
    with pytest.raises(ConfigError, match=r'2 and 3 tasks, 1 in common; only one has "a"\).*--common'):
        compare(first, second)
    (found,) = compare(first, second, common=True)
    assert (found.tasks, found.same) == (1, 1)


@pytest.mark.parametrize(
    ("first", "second", "common", "problem"),
    [
        (result(score("a", 0)), result(score("b", 0)), True, 'no task in common .one has "a", the other "b"'),
        (result(score("a", 0)), result(), True, "no episodes are on record"),
        (result(score("a", 0)), result(score("a", 0), name="test"), True, "none in common"),
        (
            replace(result(score("a", 0)), sets=(*result(score("a", 0)).sets, SetResult("more", {}, ()))),
            result(score("a", 0)),
            False,
            'only one of both has the sets "more"',
        ),
        (
            result(score("1", 0, digest="one")),
            result(score("1", 0, digest="other")),
            True,
            "same id and ask something else",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(
    first: EvaluationResult, second: EvaluationResult, common: bool, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        compare(first, second, common)


def test_a_digest_is_of_what_is_asked_and_answered() -> None:
    digests = [task_digest(Task("1", instruction=i, answer=a)) for i, a in (("x", 1), ("y", 1), ("x", 2), ("x", 1))]
    assert len(set(digests)) == 3 and digests[0] == digests[3]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_result_is_written_and_read_exactly(tmp_path: Path) -> None:
    tasks = [Task("0", instruction="x", source="s"), Task("1", instruction="y", source="s")]
    episodes = [episode("0", True, "s"), episode("0", False, "s"), episode("1", True, "s", error="broke")]
    made = EvaluationResult("m", (set_result("dev", {"pass@1": 0.25}, tasks, episodes),))
    write_evaluation(made, tmp_path / "a.json")
    assert read_evaluation(str(tmp_path / "a.json")) == made
    one, other = made.sets[0].tasks
    assert (one.correct, one.attempts, one.failed, one.reward) == (1, 2, 0, 0.5)
    assert (other.correct, other.attempts, other.failed, other.reward) == (0, 1, 1, 0.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not JSON", "is no file of headrace eval --json"),
        ("[1]", "its format is None"),
        ('{"headrace_evaluation": 9}', "its format is 9"),
        ('{"headrace_evaluation": 1, "of": "m"}', "needs the field sets"),
    ],
)
def test_another_file_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_evaluation(str(tmp_path / "a.json"))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was evaluated at steps 0 and 4; in between it has learned task 2, and task 1 breaks."""
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "run"
    folder.mkdir()
    with Ledger.open(folder) as ledger:
        ledger.evaluated(0, "dev", {"pass@1": 1 / 3}, [episode("0", True), episode("1", True), episode("2", False)])
        later = [episode("0", True), episode("1", True, error="broke"), episode("2", True)]
        ledger.evaluated(4, "dev", {"pass@1": 2 / 3}, later)
    return folder


def test_runs_are_compared_by_their_ledgers(run_dir: Path, tmp_path: Path, capsys: Caught) -> None:
    out = tmp_path / "difference.json"
    assert run(["compare", f"{run_dir}@0", str(run_dir), "--json", str(out)]) == 0
    assert f"{run_dir}, step 4 against {run_dir}, step 0" in " ".join(capsys.readouterr().out.split())
    (found,) = json.loads(out.read_text())["differences"]
    assert (found["better"], found["worse"], found["same"], found["difference"]) == (1, 1, 1, 0.0)


def test_a_run_and_a_file_are_compared(run_dir: Path, tmp_path: Path, capsys: Caught) -> None:
    write_evaluation(result(score("0", 1), score("1", 1), score("2", 1)), tmp_path / "a.json")
    assert run(["compare", str(run_dir), str(tmp_path / "a.json")]) == 0
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in capsys.readouterr().out.splitlines()]
    assert ["dev", "", "3", "0.6667", "1.0000", "+0.3333"] in [row[:6] for row in rows]


@pytest.mark.parametrize(
    ("place", "problem"),
    [("{run}@3", "not evaluated at step 3, but at 0, 4"), ("{run}/nowhere", "there is no"), ("{empty}", "ledger")],
)
def test_a_place_without_that_evaluation_is_named(
    place: str, problem: str, run_dir: Path, tmp_path: Path, capsys: Caught
) -> None:
    (tmp_path / "empty").mkdir()
    words = place.format(run=run_dir, empty=tmp_path / "empty")
    assert run(["compare", str(run_dir), words]) == 2
    assert problem in capsys.readouterr().err
