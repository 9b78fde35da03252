"""Run files laid over each other: which value wins, and which file a problem is blamed on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.main import run
from headrace.config.loading import load_config
from headrace.errors import ConfigError

BASE = """
[run]
name = "base"
[data]
args = { split = "train", count = 500 }
[optimizer]
lr = 1e-4
[trainer]
steps = 20
callbacks = ["a:A", "b:B"]
[eval.sets.dev]
tasks = "countdown"
limit = 5
"""
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return Path(name)

    file("base.toml", BASE)
    return file


def test_a_later_file_replaces_values_and_leaves_the_others(write: Write) -> None:
    over = write("over.toml", "[optimizer]\nlr = 1e-5\n[model]\nname = 'other'\n[trainer]\ncallbacks = ['c:C']\n")
    config = load_config(["base.toml", over])
    assert (config.optimizer.lr, config.model.name, config.trainer.callbacks) == (1e-5, "other", ("c:C",))
    assert (config.trainer.steps, config.run.name) == (20, "base")


def test_the_last_file_wins_and_an_override_over_all(write: Write) -> None:
    first, second = (write(f"{n}.toml", f"[trainer]\nsteps = {n}\n") for n in (1, 2))
    assert load_config(["base.toml", first, second]).trainer.steps == 2
    assert load_config(["base.toml", second, first], ["--trainer.steps", "9"]).trainer.steps == 9


def test_a_table_is_laid_over_key_by_key_and_an_empty_one_empties_it(write: Write) -> None:
    over = write("over.toml", "[data.args]\ncount = 7\n[eval.sets.test]\ntasks = 'countdown'\n")
    config = load_config(["base.toml", over])
    assert config.data.args == {"split": "train", "count": 7}
    assert list(config.eval.sets) == ["dev", "test"]
    assert load_config(["base.toml", write("none.toml", "[eval]\nsets = {}\n")]).eval.sets == {}


def test_an_empty_section_changes_nothing(write: Write) -> None:
    assert load_config(["base.toml", write("over.toml", "[trainer]\n[eval]\n")]) == load_config("base.toml")


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ("[trainer]\nstpes = 3\n", 'over.toml: unknown key "trainer.stpes" (did you mean "steps"?)'),
        ("[trainer]\nsteps = 'many'\n", "over.toml: trainer.steps: input should be a valid integer"),
        ("trainer = 3\n", "over.toml: trainer is a value, and a table in the file that it is laid over"),
        ("[trainer.steps]\na = 1\n", "over.toml: trainer.steps is a table, and a value in the file"),
        ("[optimizer]\nmin_lr_ratio = 0.1\n", "over.toml: optimizer.min_lr_ratio = 0.1 has no effect"),
        ("[rollout]\ngroup_size = 1\n", "over.toml: rollout.group_size must be at least 2"),
        ("[trainer\n", "over.toml is not valid TOML"),
    ],
)
def test_a_problem_names_the_file_that_causes_it(write: Write, over: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(["base.toml", write("over.toml", over), write("last.toml", "[run]\nseed = 1\n")])
    assert str(raised.value).startswith(says)


def test_problems_of_several_files_are_reported_together(write: Write) -> None:
    bad, worse = write("bad.toml", "[run]\nsede = 1\n"), write("worse.toml", "[trainer]\nsteps = 0\n")
    with pytest.raises(ConfigError) as raised:
        load_config(["base.toml", bad, worse], ["--model.nmae=x"])
    parts = str(raised.value).split("; ")
    assert [part.partition(":")[0] for part in parts] == ["bad.toml", "worse.toml", "command line"]


def test_what_the_first_file_causes_is_blamed_on_it(write: Write) -> None:
    write("base.toml", "[optimizer]\nmin_lr_ratio = 0.1\n")
    with pytest.raises(ConfigError, match=r"^base\.toml: optimizer\.min_lr_ratio"):
        load_config(["base.toml", write("over.toml", "[trainer]\nsteps = 3\n")])


def test_no_file_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no run file to read"):
        load_config([])


# ---- on the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["over.toml", "--run.seed", "3"], ["--run.seed=3", "over.toml"], ["--run.seed", "3", "--dry-run", "over.toml"]],
)
def test_files_and_options_go_in_any_order(write: Write, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    write("base.toml", "[run]\nname = 'base'\n[workflow]\njudger = 'countdown'\n")
    write("over.toml", "[trainer]\nsteps = 2\n[run]\nseed = 1\n")
    assert run(["train", "base.toml", *words, *(() if "--dry-run" in words else ["--dry-run"])]) == 0
    out = capsys.readouterr().out
    assert "steps = 2" in out and "seed = 3" in out and 'name = "base"' in out


def test_a_value_that_looks_like_a_file_is_a_value(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("base.toml", "[workflow]\njudger = 'countdown'\n")
    assert run(["train", "base.toml", "--run.name", "x.toml", "--dry-run"]) == 0
    assert 'name = "x.toml"' in capsys.readouterr().out


def test_a_missing_overlay_is_one_line(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("cluster.toml", "")
    assert run(["train", "base.toml", "clutser.toml"]) == 2
    assert 'there is no run file clutser.toml (did you mean "cluster.toml"?)' in capsys.readouterr().err
