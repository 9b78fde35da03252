"""Sources of tasks: every kind is read, columns are mapped, and a bad row says where it stands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from reasoning_gym.factory import DATASETS

from headrace.config import SourceSection
from headrace.data.episode import Episode, Step, Trajectory
from headrace.data.sources import Loaded, load_source
from headrace.data.sources.load import column_at, fill_template
from headrace.data.sources.reasoning_gym import BY_HASH, problem_of
from headrace.data.task import Task, load_tasks
from headrace.errors import ConfigError, DataError, MissingExtraError, WorkflowError
from headrace.judge.base import Verdict
from headrace.judge.pool import WorkerPool
from headrace.judge.reasoning_gym import ReasoningGymJudger
from headrace.registry import resolve

ROWS: list[dict[str, Any]] = [
    {"question": "Capital of France?", "truth": {"value": "Paris"}, "level": 1},
    {"question": "Capital of Peru?", "truth": {"value": "Lima"}, "level": 2},
]
MAPPED: dict[str, Any] = {"columns": {"instruction": "question", "answer": "truth.value"}}
COMPOSED = "composite"  # made of other families by objects; a mixture does the same


def load(source: Any, skip_bad: bool = False, **settings: Any) -> Loaded:
    if isinstance(source, str | Path):
        return load_source(SourceSection(tasks=str(source), **settings), skip_bad=skip_bad)
    return load_source(SourceSection(tasks="given", **settings), source, skip_bad=skip_bad)


def said(text: str) -> Episode:
    return Episode("t", (Trajectory((Step((1,), (2,), text=text),)),))


# ---- kinds -----------------------------------------------------------------------------------------------------------


def as_jsonl(folder: Path) -> tuple[str, dict[str, Any]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(folder / "rows.jsonl"), {}


def as_parquet(folder: Path) -> tuple[str, dict[str, Any]]:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return str(folder / "rows.parquet"), {}


def as_saved(folder: Path) -> tuple[str, dict[str, Any]]:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return str(folder / "saved"), {}


def as_saved_splits(folder: Path) -> tuple[str, dict[str, Any]]:
    splits: Any = {"train": datasets.Dataset.from_list(ROWS[:1]), "all": datasets.Dataset.from_list(ROWS)}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    return str(folder / "splits"), {"split": "all"}


def as_named(folder: Path) -> tuple[str, dict[str, Any]]:
    path, _ = as_jsonl(folder)
    return "hf:json", {"data_files": path, "cache_dir": str(folder / "cache")}


def as_function(folder: Path) -> tuple[str, dict[str, Any]]:
    (folder / "own_rows.py").write_text(f"def rows(count):\n    return {ROWS!r}[:count]\n")
    return f"{folder / 'own_rows.py'}:rows", {"count": 2}


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_saved, as_saved_splits, as_named, as_function])
def test_every_kind_of_source_gives_the_same_tasks(tmp_path: Path, write: Any) -> None:
    source, args = write(tmp_path)
    found = load(source, args=args, keep_columns=True, **MAPPED).tasks
    assert [(task.id, task.instruction, task.answer, task.source) for task in found] == [
        ("1", "Capital of France?", "Paris", "default"),
        ("2", "Capital of Peru?", "Lima", "default"),
    ]
    assert [task.metadata["level"] for task in found] == [1, 2]


def test_an_iterable_is_a_source() -> None:
    assert load((row for row in ROWS), **MAPPED).tasks == load(ROWS, **MAPPED).tasks


@pytest.mark.parametrize(
    ("source", "args", "error", "says"),
    [
        ("nowhere.parquet", {}, DataError, "there is no task file nowhere.parquet"),
        ("broken.parquet", {}, DataError, "cannot read the task file broken.parquet"),
        ("broken.jsonl", {}, DataError, "cannot read the task file broken.jsonl"),
        ("folder", {}, DataError, "folder is a folder, and no dataset that `save_to_disk` wrote"),
        ("broken.parquet", {"count": 1}, ConfigError, "takes no arguments, got count"),
        ("splits", {"split": "tset"}, DataError, 'has no split "tset"; set args = { split = … } to one of train, all'),
        ("splits", {"count": 1}, ConfigError, 'takes only the argument "split", got count'),
        ("hf:json", {"data_files": "nowhere.jsonl"}, DataError, 'cannot load the dataset "json", split "train"'),
        ("reasoning_gym:cuontdown", {}, ConfigError, 'no family "cuontdown" (did you mean "countdown"?)'),
        ("reasoning_gym:countdown", {"sizes": 3}, ConfigError, 'no setting "sizes" (did you mean "size"?)'),
        ("reasoning_gym:countdown", {"min_numbers": 9}, ConfigError, 'the family "countdown" refuses'),
    ],
)
def test_a_source_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, args: dict[str, Any], error: type, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("broken.parquet").write_text("no parquet")
    Path("broken.jsonl").write_bytes(b"\xff\xfe{}")
    as_saved_splits(Path())
    with pytest.raises(error) as raised:
        load(source, args=args)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("package", "source", "extra"),
    [("pyarrow", "x.parquet", "parquet"), ("datasets", "hf:x", "datasets"),
     ("reasoning_gym", "reasoning_gym:countdown", "reasoning-gym")],
)  # fmt: skip
def test_a_source_whose_package_is_missing_says_what_to_install(package: str, source: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from headrace.data.task import load_tasks\nload_tasks({source!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f'pip install -e ".[{extra}]" -c' in done.stderr and MissingExtraError.__name__ in done.stderr


# ---- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "found"),
    [("a", 1), ("b.c", 2), ("d.0", 3), ("d.1.e", 4), ("x.y", 5)],
)
def test_dots_lead_into_a_column_unless_they_are_its_name(path: str, found: int) -> None:
    assert column_at({"a": 1, "b": {"c": 2}, "d": [3, {"e": 4}], "x.y": 5, "x": {"y": 6}}, path, "answer") == found


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}\nAnswer:", "Why?\nAnswer:"),
        ("{more.hint} {{x}}", "A hint {x}"),
        ("{list.0}", "7"),
        ("none", "none"),
    ],
)
def test_a_template_is_filled_with_columns(template: str, text: str) -> None:
    assert fill_template(template, {"question": "Why?", "more": {"hint": "A hint"}, "list": [7]}) == text


def test_a_field_that_is_not_named_is_taken_from_the_column_of_its_name() -> None:
    row = {"id": "q", "question": "Why?", "answer": "So.", "source": "web", "noise": 1}
    (task,) = load([row], columns={"instruction": "question"}).tasks
    assert task == Task("q", instruction="Why?", answer="So.", source="web")


def test_what_a_template_asks_goes_before_messages_of_the_row() -> None:
    row = {"messages": [{"role": "user", "content": "old"}], "instruction": "Why?"}
    (task,) = load([row], template="{instruction} Think.").tasks
    assert task.messages == ({"role": "user", "content": "Why? Think."},)


@pytest.mark.parametrize(
    ("settings", "metadata"),
    [
        ({"columns": {"instruction": "q"}}, {"own": 1}),
        ({"columns": {"instruction": "q"}, "keep_columns": True}, {"own": 1, "level": 3, "when": "2020-01-01"}),
        ({"template": "{q}", "keep_columns": True}, {"own": 1, "q": "Why?", "level": 3, "when": "2020-01-01"}),
    ],
)
def test_other_columns_are_kept_only_if_wanted(settings: dict[str, Any], metadata: dict[str, Any]) -> None:
    from datetime import date

    row = {"q": "Why?", "level": 3, "when": date(2020, 1, 1), "metadata": {"own": 1}}
    (task,) = load([row], **settings).tasks
    assert task.metadata == metadata and json.loads(task.to_json())


def test_the_system_prompt_stands_first_unless_the_row_has_its_own() -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "b"}]
    first, second = load([{"instruction": "a"}, {"messages": own}], system="Be brief.").tasks
    assert [message["content"] for message in first.messages] == ["Be brief.", "a"] and first.instruction == "a"
    assert list(second.messages) == own


# ---- bad rows --------------------------------------------------------------------------------------------------------

BAD = """{"instruction": "a"}
{"instruction": 5}
{"instructon": "b"}
{"instruction"
{"id": "1", "instruction": "c"}
[1]
{"instruction": "d"}
"""


def test_bad_rows_are_left_out_if_wanted_and_the_first_three_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(BAD)
    with pytest.raises(DataError, match='line 2: task "2": instruction must be text, got 5'):
        load(path)
    found = load(path, skip_bad=True)
    assert [task.id for task in found.tasks] == ["1", "7"] and len(found.bad_rows) == 5
    warning = found.warning()
    assert warning is not None and warning.startswith("5 bad rows were left out: ")
    assert f'{path}, line 2: task "2": instruction must be text, got 5; ' in warning
    assert "line 3" in warning and "line 4: not valid JSON" in warning and warning.endswith("; and 2 more")


def test_a_source_of_bad_rows_only_is_an_error_that_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"x": 1}\n')
    with pytest.raises(DataError, match=r"has no tasks; 1 bad rows were left out: .*line 1: Task has no field x"):
        load(path, skip_bad=True)


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"question": "a"}, {}, "row 1: Task has no field question; its fields are"),
        ({"question": "a"}, {}, "say which columns to take with columns, or keep all with keep_columns = true"),
        (
            {"question": "a"},
            {"columns": {"instruction": "q"}},
            'row 1: instruction: there is no column "q"; the row has',
        ),
        ({"q": None}, {"columns": {"instruction": "q"}}, 'row 1: instruction: the column "q" is empty'),
        ({"q": 5}, {"columns": {"instruction": "q"}}, "instruction must be text, got 5"),
        ({"a": 5}, {"template": "{q}"}, 'row 1: template: there is no column "q"; the row has a'),
        (
            Task("t", instruction="a"),
            {"template": "{q}"},
            "columns and template are for rows, and this is a Task already",
        ),
        (Task("t", instruction="a"), {"keep_columns": True}, "keep_columns is for rows, and this is a Task already"),
    ],
)
def test_a_row_that_does_not_fit_says_what_was_expected(row: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as raised:
        load([row], **settings)
    assert says in str(raised.value)


def test_an_empty_answer_is_no_mistake() -> None:
    (task,) = load([{"instruction": "a", "gold": None}], columns={"answer": "gold"}).tasks
    assert task.answer is None


# ---- reasoning gym ---------------------------------------------------------------------------------------------------

_LOOP = asyncio.new_event_loop()
_POOLS: dict[float, WorkerPool] = {}


def scored(task: Task, reply: str, timeout_s: float = 60.0, **args: Any) -> Verdict:
    """By a judger whose worker is that of the other tests: each takes seconds to start."""
    judger = ReasoningGymJudger(timeout_s=timeout_s, **args)
    judger._pool = _POOLS.setdefault(timeout_s, judger._pool)
    return _LOOP.run_until_complete(judger.judge(task, said(reply)))


@pytest.fixture(scope="module", autouse=True)
def workers_end() -> Iterator[None]:
    yield
    for pool in _POOLS.values():
        _LOOP.run_until_complete(pool.close())
    _LOOP.close()


def test_generated_problems_depend_on_their_settings_alone() -> None:
    first, again = (load_tasks("reasoning_gym:countdown", size=3) for _ in range(2))
    other = load_tasks("reasoning_gym:countdown", size=3, seed=1)
    assert first == again and first != other and [task.source for task in first] == ["countdown"] * 3


@pytest.mark.parametrize(
    ("reply", "args", "reward"),
    [
        ("I think <answer>{}</answer>", {}, 1.0),
        ("{}", {}, 1.0),
        ("{}", {"tags_required": True}, 0.0),
        ("<answer>1</answer>", {}, 0.01),
    ],
)
def test_a_reply_is_scored_by_the_family_it_is_of(reply: str, args: dict[str, Any], reward: float) -> None:
    (task,) = load_tasks("reasoning_gym:countdown", size=1)
    verdict = scored(task, reply.format(task.answer), **args)
    assert verdict.reward == pytest.approx(reward, abs=0.05) and verdict.is_correct == (reward == 1.0)
    assert verdict.metrics == {"answer_tags": float("<answer>" in reply), "judge_timed_out": 0.0}


def test_a_scorer_that_raises_fails_the_episode_or_gives_the_score_that_is_wanted() -> None:
    (task,) = load_tasks("reasoning_gym:prime_factorization", size=1)
    with pytest.raises(WorkflowError, match=r'family "prime_factorization" failed on task .*: ValueError'):
        scored(task, "no number")
    assert scored(task, "no number", error_score=0.0).reward == 0.0


def test_a_reply_that_the_scorer_never_ends_with_is_wrong_and_the_next_one_is_scored() -> None:
    (task,) = load_tasks("reasoning_gym:countdown", size=1)
    late = scored(task, "<answer>" + "9**" * 9 + "9</answer>", timeout_s=1.0)
    assert late.reward == 0.0 and not late.is_correct and late.metrics["judge_timed_out"] == 1.0
    assert scored(task, f"<answer>{task.answer}</answer>", timeout_s=1.0).is_correct


def test_a_task_from_elsewhere_cannot_be_scored_by_reasoning_gym() -> None:
    with pytest.raises(WorkflowError, match='task "t" is none; use another judger'):
        asyncio.run(resolve("judger", "reasoning_gym")().judge(Task("t", instruction="a"), said("x")))


NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # `answer` is only an example


FAMILIES = [  # a process of its own for each of these takes seconds
    pytest.param(family, marks=pytest.mark.slow) if family in BY_HASH else family
    for family in sorted(set(DATASETS) - {COMPOSED})
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_scores_its_own_answer(family: str) -> None:
    tasks = load_tasks(f"reasoning_gym:{family}", size=2)
    assert [Task.from_json(task.to_json()) for task in tasks] == tasks
    for task in tasks:
        assert problem_of(task.metadata)[1]["question"] == task.instruction
        verdict = scored(task, f"<answer>{task.answer}</answer>")
        assert verdict.is_correct or family in NO_ORACLE


MAKE = """
import json, random, sys
from headrace.data.task import load_tasks
random.seed(sys.argv[1])
made = {family: [t.to_json() for t in load_tasks(f"reasoning_gym:{family}", size=3)] for family in sys.argv[3:]}
open(sys.argv[2], "w").write(json.dumps(made))
"""


def made_anew(path: Path, seed: str, families: list[str]) -> dict[str, list[str]]:
    """Problems of families, made by a process with other hashes and another random state."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, "-c", MAKE, seed, str(path), *families], env=environment, check=True)
    return json.loads(path.read_text())


def test_problems_that_depend_on_the_random_state_are_made_the_same_in_every_process(tmp_path: Path) -> None:
    made = [task.to_json() for task in load_tasks("reasoning_gym:list_functions", size=3)]
    assert made_anew(tmp_path / "made", "7", ["list_functions"]) == {"list_functions": made}


@pytest.mark.slow
def test_the_problems_of_every_family_are_the_same_in_every_process(tmp_path: Path) -> None:
    families = sorted(set(DATASETS) - {COMPOSED})
    first, second = (made_anew(tmp_path / seed, seed, families) for seed in ("1", "2"))
    assert [family for family in families if first[family] != second[family]] == []
