"""Run files and overrides: values as they are meant, and one sentence for every mistake."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.config import RunConfig
from headrace.config.loading import build_config, field_paths, load_config, parse_overrides
from headrace.errors import ConfigError

BASE: dict[str, Any] = {
    "trainer": {"steps": 3},
    "eval": {"sets": {"x": {"tasks": "countdown", "args": {"count": 4}}, "dev-set": {"tasks": "countdown"}}},
}


def overridden(*words: str) -> RunConfig:
    return build_config(BASE, words)


def mistake(values: dict[str, Any], *words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        build_config(values, words)
    said = str(raised.value)
    assert "\n" not in said
    return said


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


# ---- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("trainer.steps", "7", 7),
        ("run.seed", "-1", -1),
        ("optimizer.lr", "2e-4", 2e-4),
        ("optimizer.lr", "1", 1.0),
        ("data.shuffle", "false", False),
        ("data.shuffle", "False", False),
        ("filters.drop_uniform", "true", True),
        ("run.name", "first", "first"),
        ("run.name", '"7"', "7"),
        ("run.name", "7", "7"),
        ("run.name", "2026-05-01", "2026-05-01"),
        ("run.name", "true", "true"),
        ("run.name", "1e3", "1e3"),
        ("run.name", "[1]", "[1]"),
        ("run.name", "a=b", "a=b"),
        ("run.name", "two words", "two words"),
        ("run.dir", "/tmp/runs", Path("/tmp/runs")),
        ("run.dir", "2026", Path("2026")),
        ("workflow.judger", "7", "7"),
        ("eval.sets.x.tasks", "7", "7"),
        ("eval.sets.dev-set.tasks", "2026-05-01", "2026-05-01"),
        ("algorithm.roles.critic.loss", "cispo", "cispo"),
        ("algorithm.roles.critic.train", "false", False),
        ("workflow.name", "my.module:flow", "my.module:flow"),
        ("workflow.judger", "countdown", "countdown"),
        ("rollout.stop", '["END", "a,b"]', ("END", "a,b")),
        ("rollout.stop", "[]", ()),
        ("rollout.stop", "END", ("END",)),
        ("rollout.stop", "7", ("7",)),
        ("track.trackers", "jsonl", ("jsonl",)),
        ("filters.drop_terminations", "length", ("length",)),
        ("optimizer.betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("model.lora.rank", "8", 8),
        ("data.args", "{count = 5, nested = {deep = [1]}}", {"count": 5, "nested": {"deep": [1]}}),
        ("data.args.count", "5", 5),
        ("data.args.split", "test", "test"),
        ("data.args.a.b.c", "1.5", 1.5),
        ("eval.sets.x.args.count", "5", 5),
        ("eval.sets.x.temperature", "0.5", 0.5),
    ],
)
def test_an_override_is_read_as_what_the_setting_wants_or_else_as_what_it_looks_like(
    key: str, text: str, value: Any
) -> None:
    for words in ((f"--{key}", text), (f"--{key}={text}",)):
        found = value_at(overridden(*words), key)
        assert found == value and type(found) is type(value)


def test_an_item_of_a_list_of_texts_is_quoted_as_in_a_file() -> None:
    assert "rollout.stop.1: input should be a valid string, got 7" in mistake(BASE, "--rollout.stop", '["END", 7]')


def test_an_override_changes_nothing_else() -> None:
    plain = overridden().model_dump()
    changed = overridden("--eval.sets.x.args.count", "5").model_dump()
    assert changed["eval"]["sets"]["x"]["args"] == {"count": 5}
    changed["eval"]["sets"]["x"]["args"] = {"count": 4}
    assert changed == plain


def test_an_override_can_add_a_set() -> None:
    config = overridden("--eval.sets.new.tasks", "countdown", "--eval.sets.new.args.split", "test")
    assert list(config.eval.sets) == ["x", "dev-set", "new"]
    assert config.eval.sets["new"].args == {"split": "test"}


def test_the_last_override_wins() -> None:
    assert overridden("--trainer.steps", "1", "--trainer.steps=2").trainer.steps == 2


def test_dashes_stand_for_underscores() -> None:
    config = overridden("--trainer.batch-size", "2", "--data.args.max-number", "9")
    assert config.trainer.batch_size == 2 and config.data.args == {"max_number": 9}


def test_a_name_with_a_dash_is_that_name() -> None:
    config = overridden("--eval.sets.dev-set.attempts", "4", "--eval.sets.dev-set.temperature", "1")
    assert list(config.eval.sets) == ["x", "dev-set"]
    assert config.eval.sets["dev-set"].attempts == 4


def test_overrides_leave_the_callers_values_alone() -> None:
    before = copy.deepcopy(BASE)
    overridden("--trainer.steps", "9", "--eval.sets.x.args.count", "9", "--run.name", "other")
    assert before == BASE


@examples
@given(st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans() | st.lists(st.integers(-9, 9)))
def test_any_plain_value_comes_through(value: Any) -> None:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    assert overridden("--data.args.value", text).data.args["value"] == value


@examples
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])))
def test_a_quoted_text_comes_through_as_it_is(text: str) -> None:
    quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert overridden(f"--data.args.value={quoted}").data.args["value"] == text


def test_words_become_pairs() -> None:
    assert list(parse_overrides(["--a.b", "--c", "--d=e=f", "--g="])) == [("a.b", "--c"), ("d", "e=f"), ("g", "")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trainer.steps"], "--trainer.steps needs a value"),
        (["trainer.steps", "3"], 'expected an option such as --trainer.steps, got "trainer.steps"'),
        (["--trainer.steps", "3", "4"], 'expected an option such as --trainer.steps, got "4"'),
        (["--trainer.steps.more", "3"], "--trainer.steps.more: trainer.steps is a value, not a section"),
        (["--trainer.stpes", "3"], 'command line: unknown key "trainer.stpes" (did you mean "steps"?)'),
        (["--trianer.steps", "3"], 'command line: unknown key "trianer" (did you mean "trainer"?)'),
        (["--trainer.steps", "many"], "command line: trainer.steps: input should be a valid integer"),
        (["--eval.sets.x.temprature", "1"], 'unknown key "eval.sets.x.temprature" (did you mean "temperature"?)'),
        (["--eval.sets.y.attempts", "2"], "eval.sets.y.tasks: field required"),
    ],
)
def test_a_wrong_override_is_one_sentence(words: list[str], says: str) -> None:
    assert says in mistake(BASE, *words)


# ---- mistakes in values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"trianer": {"steps": 3}}, 'unknown key "trianer" (did you mean "trainer"?)'),
        ({"trainer": {"lr": 1e-4}}, 'unknown key "trainer.lr" (did you mean "optimizer.lr"?)'),
        ({"model": {"lora": {"rnak": 4}}}, 'unknown key "model.lora.rnak" (did you mean "rank"?)'),
        ({"run": {"zzz": 1}}, 'unknown key "run.zzz"; known here: name, dir, resume, seed'),
        ({"trainer": {"steps": -1}}, "trainer.steps: input should be greater than or equal to 1, got -1"),
        ({"trainer": {"steps": 1.5}}, "trainer.steps: input should be a valid integer"),
        ({"model": {"dtype": "int8"}}, "model.dtype: input should be 'auto', 'float32', 'bfloat16' or 'float64', got"),
        ({"trainer": 3}, "trainer: input should be a valid dictionary"),
        ({"backend": {"ranks": 0}}, "backend.ranks: input should be greater than or equal to 1 or 'auto', got 0"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size must be at least 2 for grpo, got 1; raise rollout.group"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature must be above 0 to train, got 0"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_place_and_value(values: dict[str, Any], says: str) -> None:
    said = mistake(values)
    assert said.startswith("configuration: ") and says in said
    assert "Value error" not in said


def test_all_mistakes_are_reported_at_once() -> None:
    said = mistake({"trainer": {"steps": -1}, "rnu": {}})
    assert "trainer.steps" in said and 'unknown key "rnu"' in said and "; " in said


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_and_overridden(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[trainer]\nsteps = 3\n[eval.sets.x]\ntasks = "countdown"\nargs = {count = 4, split = "test"}\n')
    config = load_config(path, ["--eval.sets.x.args.count", "5"])
    assert config.trainer.steps == 3
    assert config.eval.sets["x"].args == {"count": 5, "split": "test"}


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    assert load_config(path) == RunConfig()


def test_mistakes_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for content, says in [
        (b"[trainer]\nstpes = 3\n", 'unknown key "trainer.stpes"'),
        (b"[trainer\n", "is not valid TOML"),
        (b"\xff\xfe", "cannot read"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ConfigError) as raised:
            load_config(path)
        assert str(path) in str(raised.value) and says in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_gets_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "countdown.toml").touch()
    with pytest.raises(
        ConfigError, match=r'there is no run file .*cuntdown\.toml \(did you mean "countdown\.toml"\?\)'
    ):
        load_config(tmp_path / "cuntdown.toml")
    with pytest.raises(ConfigError, match="there is no run file"):
        load_config(tmp_path / "nowhere" / "run.toml")
    with pytest.raises(ConfigError, match="is a folder; give the run file in it"):
        load_config(tmp_path)


def test_field_paths_name_every_setting_once() -> None:
    paths = [path for path, _ in field_paths()]
    assert len(paths) == len(set(paths))
    assert {"run.seed", "model.lora.rank", "trainer.steps", "eval.sets"} <= set(paths)
    assert "model.lora" not in paths
