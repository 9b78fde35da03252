"""`headrace doctor --plan`: what it compares with, and what it recommends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import run
from headrace.cli.plan import _changed, _remedies
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.models.plan import MemoryPlan, ModelShape, memory_plan

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "countdown.toml")
SEVEN_B = ModelShape(28, 3584, 18944, 3584, 512, 152_064, False)
ADAPTERS: dict[str, Any] = {"model": {"device": "cuda", "lora": {"rank": 16}, "quantize": "nf4"}}
LONG = {"rollout": {"max_tokens": 16_384}, "backend": {"gradient_checkpointing": True}}


def planned(**sections: Any) -> tuple[RunConfig, MemoryPlan]:
    config = build_config(sections)
    return config, memory_plan(config, SEVEN_B)


def test_when_generating_is_the_peak_the_engine_is_named_and_the_learner_is_not() -> None:
    config, plan = planned(**ADAPTERS, **LONG)
    assert plan.generating > plan.training
    said = _remedies(config, SEVEN_B, plan)
    assert "generating takes the most" in said and "engine.max_batch = " in said and "rollout.max_tokens = 8192" in said
    assert "backend." not in said


def test_when_training_is_the_peak_the_learner_is_named_and_the_engine_is_not() -> None:
    config, plan = planned(model={"device": "cuda"})
    assert plan.training > plan.generating
    said = _remedies(config, SEVEN_B, plan)
    assert "training takes the most" in said and "backend.gradient_checkpointing = true" in said
    assert "engine." not in said and "rollout." not in said


@pytest.mark.parametrize(
    "sections", [{**ADAPTERS, **LONG}, {"model": {"device": "cuda"}}, {"model": {"device": "cpu"}}]
)
def test_every_remedy_makes_the_plan_smaller(sections: dict[str, Any]) -> None:
    config, plan = planned(**sections)
    found = re.findall(r"([a-z_.]+) = (\S+) \(", _remedies(config, SEVEN_B, plan))
    assert found
    for path, text in found:
        value = {"true": True, '"nf4"': "nf4"}.get(text) or int(text)
        assert memory_plan(_changed(config, path, value), SEVEN_B).peak < plan.peak, path


@pytest.mark.parametrize("memory", ["nan", "inf", "0", "-5"])
def test_memory_is_a_number_above_zero(capsys: pytest.CaptureFixture[str], memory: str) -> None:
    assert run(["doctor", "--plan", EXAMPLE, f"--memory={memory}"]) == 2
    assert "--memory is a number of GiB above 0" in capsys.readouterr().err


def test_the_plan_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--plan", EXAMPLE, "--memory", "24"])
    said = capsys.readouterr().out
    assert said.startswith("planned for an accelerator: ") and "in bfloat16, optimizer in float32" in said
    assert "MiB" not in said


def test_the_plan_is_of_the_run_file_with_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> str:
        run(["doctor", "--plan", EXAMPLE, "--memory", "24", *words])
        return capsys.readouterr().out

    assert "in float32, optimizer in float32" in planned("--model.dtype=float32")
    assert planned("--backend.micro_batch_tokens", "100000") != planned()
    assert run(["doctor", "--plan", EXAMPLE, "--model.dtpye=float32"]) == 2
    assert 'did you mean "dtype"?' in capsys.readouterr().err
    assert run(["doctor", "--model.dtype=float32"]) == 2
    assert "give --plan FILE, too" in capsys.readouterr().err


def test_a_plan_for_a_device_that_is_elsewhere_needs_its_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = {device = "xpu:7"}\n')
    assert run(["doctor", "--plan", str(file)]) == 2
    assert "give --memory GIB" in capsys.readouterr().err


def test_a_model_of_the_hub_that_is_not_here_comes_with_the_command_that_fetches_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = {name = "nobody/nothing-7B"}\n')
    assert run(["doctor", "--plan", str(file), "--memory", "24"]) == 2
    assert "`hf download nobody/nothing-7B config.json`" in capsys.readouterr().err
