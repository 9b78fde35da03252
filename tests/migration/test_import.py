"""`headrace import`: configurations that verl, rLLM and TRL wrote themselves become run files; nothing is dropped."""

from __future__ import annotations

import json
import pprint
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.main import run
from headrace.config.loading import load_config
from headrace.errors import ConfigError
from headrace.migration.carry import Fate, Imported, Line
from headrace.migration.read import read_settings
from headrace.migration.rllm import import_rllm
from headrace.migration.trl import import_trl
from headrace.migration.verl import import_verl
from headrace.migration.verl_rollout import TOOL_LOOP

CONFIGS = Path(__file__).parent / "configs"
VERL = ("verl_grpo", "verl_lora", "verl_tool")
IMPORTS = {"verl": import_verl, "rllm": import_rllm, "trl": import_trl}
ALL = [*(("verl", f"{name}.yaml") for name in VERL), ("rllm", "rllm.yaml"), ("trl", "trl.json")]


def decide(file: Path) -> None:
    """As a user does it in the end: nothing is left in the list."""
    text = file.read_text()
    file.write_text(re.sub(r"^undecided = \[.*?^\]", "undecided = []", text, flags=re.MULTILINE | re.DOTALL))


def given(name: str, **changes: Any) -> dict[str, Any]:
    return read_settings(CONFIGS / name) | {key.replace("__", "."): value for key, value in changes.items()}


def line_of(made: Imported, key: str) -> Line:
    (found,) = [line for line in made.lines if line.key == key]
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the task files that verl's examples name."""
    for data in ("gsm8k", "math"):
        for split in ("train", "test"):
            (tmp_path / "data" / data / f"{split}.parquet").parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / data / f"{split}.parquet").touch()
    return tmp_path


def config_at(home: Path, name: str) -> Path:
    (home / name).write_text((CONFIGS / name).read_text().replace("/home/user", str(home)))
    return home / name


# ---- run files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verl_grpo", "verl_lora"])
def test_a_published_example_of_verl_passes_a_dry_run(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    code = run(["import", "verl", str(config_at(home, f"{name}.yaml")), "--tasks", "7473", "--out", "run.toml"])
    assert code == (3 if name == "verl_grpo" else 0)  # it has two files, whose weights are for the user to say
    decide(Path("run.toml"))
    capsys.readouterr()
    assert run(["train", "run.toml", "--dry-run"]) == 0, capsys.readouterr().err
    assert "[algorithm.kl]" in capsys.readouterr().out


def test_the_tool_example_runs_verls_own_loop(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert run(["import", "verl", str(config_at(home, "verl_tool.yaml")), "--out", "run.toml"]) == 0
    config = load_config("run.toml")
    assert config.workflow.name == TOOL_LOOP
    assert {"data.max_prompt_length=1024", "data.max_response_length=1024"} < {*config.workflow.args["overrides"]}
    assert any("max_assistant_turns=5" in word for word in config.workflow.args["overrides"])
    assert any("gsm8k_tool_config.yaml" in word for word in config.workflow.args["overrides"])
    assert (config.trainer.steps, config.engine.name) == (2, "sglang")


def test_where_verl_is_installed_the_tool_example_passes_a_dry_run_too(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("verl.tools", reason="verl is not installed; run this with .venv-verl/bin/python -m pytest")
    monkeypatch.chdir(home)
    run(["import", "verl", str(config_at(home, "verl_tool.yaml")), "--out", "run.toml"])
    assert run(["train", "run.toml", "--dry-run"]) == 0, capsys.readouterr().err


def test_steps_are_counted_as_here() -> None:
    grpo = import_verl(given("verl_grpo.yaml"), tasks=7473).values
    batches = 15 * (7473 // 1024)
    assert grpo["trainer.updates_per_batch"] == 1024 // 256
    assert grpo["trainer.steps"] == batches * 4
    assert (grpo["trainer.save_every"], grpo["eval.every"]) == (20 * 4, 5 * 4)


def test_lora_and_divergence_arrive() -> None:
    made = import_verl(given("verl_lora.yaml"), tasks=7473).values
    assert (made["model.lora.rank"], made["model.lora.alpha"]) == (64, 32.0)
    assert (made["algorithm.kl.coef"], made["algorithm.kl.kind"], made["algorithm.kl.where"]) == (0.001, "k3", "loss")
    assert made["data.columns"] == {
        "messages": "prompt",
        "answer": "reward_model.ground_truth",
        "source": "data_source",
    }


def test_settings_of_rllm_go_before_those_of_verl() -> None:
    made = import_rllm(given("rllm.yaml"))
    assert made.values["algorithm.estimator"] == "rloo"
    assert made.values["rollout.temperature"] == 0.7
    assert made.values["engine.max_model_length"] == 2048 + 4096
    assert made.values["run.dir"] == "checkpoints/solver-judge"
    assert (made.values["trainer.max_staleness"], made.values["trainer.steps"]) == (1, 200)
    assert made.values["filters.drop_terminations"] == ["length"]
    assert line_of(made, "algorithm.adv_estimator").note == "rllm.algorithm.adv_estimator decides"
    assert line_of(made, "rllm.algorithm.adv_estimator").ours == "algorithm.estimator"


def test_a_config_of_trl_counts_tasks_by_its_groups() -> None:
    made = import_trl(given("trl.json"))
    assert (made.values["trainer.batch_size"], made.values["rollout.group_size"]) == (32 // 8, 8)
    assert (made.values["algorithm.clip_low"], made.values["algorithm.clip_high"]) == (0.2, 0.28)
    assert made.values["algorithm.aggregation"] == "token_mean"
    assert made.values["trainer.steps"] == 250
    reuse = import_trl(given("trl.json", steps_per_generation=8, generation_batch_size=64))
    assert (reuse.values["trainer.batch_size"], reuse.values["trainer.updates_per_batch"]) == (8, 2)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_the_run_file_is_read_as_it_was_meant(kind: str, name: str, tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    run(["import", kind, str(CONFIGS / name), "--tasks", "1000", "--out", str(out)])
    made = IMPORTS[kind](given(name), 1000)
    values = tomllib.loads(out.read_text())
    assert values.pop("undecided", []) == list(made.open)
    assert values == made.nested()
    decide(out)
    assert load_config(out).optimizer.lr == pytest.approx(made.values["optimizer.lr"])


# ---- nothing is dropped in silence ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_setting_has_its_line(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = given(name)
    made = IMPORTS[kind](settings, 1000)
    assert {line.key for line in made.lines} >= set(settings)
    assert all(line.ours or line.note for line in made.lines)
    assert [line.key for line in made.lines if line.note == "unknown to this import"] == []
    run(["import", kind, str(CONFIGS / name), "--all"])
    listed = capsys.readouterr().err
    assert [key for key in settings if f"  {key} = " not in listed] == []


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_setting_of_the_run_file_comes_from_somewhere_or_is_meant(kind: str, name: str) -> None:
    made = IMPORTS[kind](given(name), 1000)
    named = {line.ours for line in made.lines}
    added = {key for key in made.values if key not in named}
    assert added <= {
        "data.columns", "data.keep_columns", "workflow.args", "backend.name", "trainer.placement", "trainer.staleness",
        "algorithm.correction.name", "algorithm.estimator", "algorithm.proximal", "optimizer.master_dtype",
        "engine.server_args", "filters.drop_terminations",
    }  # fmt: skip


def test_an_unknown_setting_is_listed() -> None:
    made = import_verl(given("verl_lora.yaml", brand_new__switch=3), tasks=10)
    assert line_of(made, "brand_new.switch").fate is Fate.LOST


@pytest.mark.parametrize(
    ("key", "value", "about"),
    [
        ("algorithm.adv_estimator", "remax", "algorithm.estimator"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "kl_cov", "algorithm.loss"),
        ("actor_rollout_ref.actor.strategy", "megatron", "backend.name"),
        ("actor_rollout_ref.rollout.name", "trtllm", "engine.name"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", "mine", "workflow.name"),
        ("actor_rollout_ref.actor.optim.optimizer", "AdamW8bit", "AdamW"),
        ("trainer.v1.trainer_mode", "separate_async", "trainer.max_staleness"),
        ("distillation.enabled", True, "distillation.enabled"),
        ("actor_rollout_ref.model.mtp.enable", True, "mtp.enable"),
        ("reward.reward_model.enable", True, "reward_model.enable"),
        ("reward.reward_manager.name", "dapo", "workflow.judger"),
        ("actor_rollout_ref.actor.ppo_epochs", 2, "ppo_epochs"),
        ("algorithm.rollout_correction.rollout_rs", "token", "rollout_rs"),
        ("data.train_max_samples", 100, "train_max_samples"),
    ],
)
def test_what_changes_the_training_and_has_no_counterpart_is_left_to_the_user(key: str, value: Any, about: str) -> None:
    made = import_verl(given("verl_lora.yaml") | {key: value}, tasks=7473)
    untouched = import_verl(given("verl_lora.yaml"), tasks=7473)
    assert untouched.open == ()
    assert any(about in text for text in made.open)
    assert line_of(made, key).fate is Fate.LOST


@pytest.mark.parametrize(
    ("key", "value"), [("num_iterations", 2), ("min_p", 0.1), ("loss_type", "sapo"), ("fp16", True)]
)
def test_trl_too_leaves_such_things_to_the_user(key: str, value: Any) -> None:
    before, after = import_trl(given("trl.json")).open, import_trl(given("trl.json", **{key: value})).open
    assert any(key in text for text in after) and not any(key in text for text in before)


def test_a_run_file_with_something_to_decide_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.toml"
    assert run(["import", "verl", str(CONFIGS / "verl_lora.yaml"), "--out", str(out)]) == 3
    said = capsys.readouterr().out
    assert "for you to decide (1)" in said and "decide what is in its list `undecided`, then headrace train" in said
    assert [text.partition(":")[0] for text in tomllib.loads(out.read_text())["undecided"]] == ["trainer.steps"]


def test_no_run_starts_before_all_is_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tasks = tmp_path / "run.toml", ["--data.tasks=countdown", "--data.columns={}", "--data.keep_columns=false"]
    run(["import", "verl", str(CONFIGS / "verl_lora.yaml"), "--out", str(out)])
    settings = [*tasks, "--eval.sets={}", "--eval.before=true", "--model.name=bundled"]
    capsys.readouterr()
    for more in (["--dry-run"], []):
        assert run(["train", str(out), *settings, *more]) == 2
        error = capsys.readouterr().err
        assert "is not decided yet: trainer.steps" in error and "remove it from the list `undecided`" in error
    decide(out)
    run(["train", str(out), *settings, "--dry-run"])
    assert "not decided" not in capsys.readouterr().err


def test_secrets_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trl.json").write_text(json.dumps(given("trl.json", hub_token="hf_sesame")))
    run(["import", "trl", str(tmp_path / "trl.json")])
    shown = capsys.readouterr()
    assert "hub_token" in shown.err and "sesame" not in shown.err + shown.out


# ---- files -------------------------------------------------------------------------------------------------------


def test_what_verl_prints_when_it_starts_is_read(tmp_path: Path) -> None:
    settings = yaml.safe_load((CONFIGS / "verl_lora.yaml").read_text())
    printed = pprint.pformat(settings)
    ray = "\n".join(f"\x1b[36m(TaskRunner pid=4711)\x1b[0m {line}" for line in printed.splitlines())
    for text in (printed, ray, json.dumps(settings)):
        (tmp_path / "printed.txt").write_text(text)
        assert read_settings(tmp_path / "printed.txt") == given("verl_lora.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: ${b}\nb: 1", "is not resolved"),
        ("- 1\n- 2", "holds no table"),
        ("a: [1", "neither YAML nor JSON"),
        ("", "is empty; give the resolved configuration"),
        ("\n \n", "is empty"),
        ("null", "holds no table"),
        ("a: 1", "no resolved configuration of verl"),
        ("!!python/object/apply:os.system ['true']", "neither YAML nor JSON"),
    ],
)
def test_a_wrong_file_is_one_clear_line(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    assert run(["import", "verl", str(tmp_path / "wrong.yaml")]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_where_it_cannot_be_written_is_said_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, says in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "no" / "run.toml", "there is no folder"),
    ):
        assert run(["import", "verl", str(CONFIGS / "verl_lora.yaml"), "--out", str(out)]) == 2
        assert says in capsys.readouterr().err
    assert run(["import", "verl", str(tmp_path)]) == 2
    assert "is a folder; give the file in it" in capsys.readouterr().err


def test_files_of_other_trainers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no section rllm"):
        import_rllm(given("verl_lora.yaml"))
    with pytest.raises(ConfigError, match="no GRPOConfig"):
        import_trl(given("verl_lora.yaml"))
    with pytest.raises(ConfigError, match="there is no file"):
        read_settings(tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        read_settings(tmp_path / "binary")


def test_a_run_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.toml"
    out.write_text("kept")
    assert run(["import", "verl", str(CONFIGS / "verl_lora.yaml"), "--out", str(out)]) == 2
    assert out.read_text() == "kept" and "exists already" in capsys.readouterr().err
    assert run(["import", "verl", str(CONFIGS / "verl_lora.yaml"), "--tasks", "0"]) == 2
