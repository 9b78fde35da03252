"""Every run file in examples/ trains, by the command that stands in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fakes import ROOT
from headrace import load_config
from headrace.cli.main import run as run_command
from headrace.models.catalog import model_folder
from verl_pool import WHY, has_verl

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
SMALL = ["--trainer.steps=1", "--trainer.batch_size=2", "--rollout.max_tokens=8"]
REAL = [path.stem for path in EXAMPLES if load_config(path).model.name == "smollm2-135m"]
# pairs need rewards that differ, so replies must be whole
OWN = {"countdown_dpo": ["--trainer.batch_size=4", "--rollout.max_tokens=60", "--run.deterministic=true"]}


def settings(path: Path, run_dir: Path) -> list[str]:
    """What makes the run small: one step, few and short rollouts, two tasks to evaluate."""
    config = load_config(path)
    words = [*SMALL, *OWN.get(path.stem, []), f"--run-dir={run_dir}"]
    words += [f"--data.mixture.{name}.args.size=16" for name in config.data.mixture]
    words += ["--data.args.count=16"] if "count" in config.data.args else []
    words += ["--eval.before=false"] if config.eval.sets else []
    words += [f"--eval.sets.{name}.limit=2" for name in config.eval.sets]
    words += [f"--eval.sets.{name}.args.count=2" for name, one in config.eval.sets.items() if "count" in one.args]
    if config.algorithm.objective == "rl" and config.rollout.group_size > 2:
        words.append("--rollout.group_size=2")
    return words


def train(path: Path, run_dir: Path, *more: str) -> dict[str, float]:
    """The last line of its metrics."""
    torch.set_num_threads(1)
    command = "sft" if "headrace sft" in path.read_text() else "train"
    assert run_command([command, str(path), *settings(path, run_dir), *more]) == 0
    assert (run_dir / "finished").is_file()
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the run files say that they are started."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_run_file_loads_and_says_how_it_is_started(path: Path) -> None:
    config = load_config(path)
    assert config.run.name.replace("-", "_") == path.stem
    assert any(f"headrace {word} examples/{path.name}" in path.read_text() for word in ("train", "sft"))


@pytest.mark.parametrize(
    "path",
    # the others need a teacher, a model that is not bundled, a server or verl, and have tests of their own
    [p for p in EXAMPLES if p.stem not in ("countdown_distill", "countdown_tinker", "countdown_verl", *REAL)],
    ids=lambda p: p.stem,
)
def test_a_run_file_trains(path: Path, tmp_path: Path) -> None:
    last = train(path, tmp_path / "run")
    assert last["step"] == 1 and last["policy/grad_norm"] >= 0 and last["tokens/trained"] > 0
    sets = load_config(path).eval.sets
    assert all(last[f"eval/{name}/tasks"] == 2 and last[f"eval/{name}/failed"] == 0 for name in sets)


def test_distillation_takes_the_exported_folder_of_a_run(tmp_path: Path) -> None:
    train(ROOT / "examples" / "countdown.toml", tmp_path / "first")
    assert run_command(["export", str(tmp_path / "first"), str(tmp_path / "teacher")]) == 0
    path = ROOT / "examples" / "countdown_distill.toml"
    last = train(path, tmp_path / "run", f"--distill.teacher={tmp_path / 'teacher'}")
    assert last["step"] == 1 and last["policy/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not model_folder("smollm2-135m").exists(), reason="headrace model get smollm2-135m")
@pytest.mark.parametrize("name", REAL)
def test_the_real_model_trains(name: str, tmp_path: Path) -> None:
    last = train(ROOT / "examples" / f"{name}.toml", tmp_path / "run")
    assert last["step"] == 1 and last["tokens/trained"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not has_verl(), reason=WHY)
def test_verl_trains_its_run_file(tmp_path: Path) -> None:
    last = train(ROOT / "examples" / "countdown_verl.toml", tmp_path / "run")
    assert last["step"] == 1 and last["tokens/trained"] > 0
