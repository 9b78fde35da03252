"""A server on the learner's GPU is started with the memory that the plan leaves it. The GPU's size is made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.engines.servers import build
from headrace.engines.servers.life import ServerOptions
from headrace.engines.sglang.build import SglangLaunch
from headrace.engines.vllm.build import new_launch
from headrace.errors import ConfigError
from headrace.models.plan import memory_plan, read_shape

GIB = 2**30
OPTIONS = ServerOptions(97, 255, sleeps=True)
SETTINGS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The shape of half a billion weights, without them."""
    folder = tiny.saved_model("qwen2", tmp_path)
    shape = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151_936}  # fmt: skip
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | shape))
    return str(folder)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "device_memory", lambda config: 24.0 * GIB)


def config(model: str, name: str, **changes: Any) -> RunConfig:
    sections: dict[str, Any] = {"model": {"name": model}, "engine": {"name": name}, **changes}
    return build_config(sections)


def command(given: RunConfig) -> list[str]:
    launch = new_launch(given, OPTIONS) if given.engine.name == "vllm" else SglangLaunch(given, OPTIONS)
    return list(launch.command(4000))


def share(given: RunConfig) -> float:
    words = command(given)
    return float(words[words.index(SETTINGS[given.engine.name]) + 1])


@pytest.mark.parametrize("engine", SETTINGS)
def test_a_server_gets_what_the_learner_leaves_while_it_samples(gpu: None, model: str, engine: str) -> None:
    given = config(model, engine)
    plan = memory_plan(given, read_shape(model))
    learner = plan.generating - plan.parts["cache"] - plan.parts["weights of the engine"]
    assert plan.parts["weights of the engine"] > 0.9 * GIB  # of its own, in bfloat16
    assert share(given) == pytest.approx(min(0.9, 1 - learner / (24 * GIB)), abs=0.01)
    ahead = config(model, engine, trainer={"max_staleness": 1})  # it is awake while the learner trains, too
    assert share(ahead) < share(given)


@pytest.mark.parametrize("engine", SETTINGS)
@pytest.mark.parametrize("separator", [" ", "="])
def test_ones_own_setting_wins(gpu: None, model: str, engine: str, separator: str) -> None:
    own = f"{SETTINGS[engine]}{separator}0.33".split()
    words = command(config(model, engine, engine={"name": engine, "server_args": own}))
    assert words[-len(own) :] == own and sum(word.startswith(SETTINGS[engine]) for word in words) == 1


@pytest.mark.parametrize("engine", SETTINGS)
def test_a_server_with_a_device_of_its_own_is_left_to_itself(gpu: None, model: str, engine: str) -> None:
    assert SETTINGS[engine] not in command(config(model, engine, trainer={"placement": "separate"}))


@pytest.mark.parametrize("engine", SETTINGS)
def test_without_a_gpu_nothing_is_said(model: str, engine: str) -> None:
    assert SETTINGS[engine] not in command(config(model, engine))


def test_a_device_that_is_too_small_is_refused_before_a_server_is_started(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "device_memory", lambda config: 8.0 * GIB)
    with pytest.raises(ConfigError, match=r'engine "vllm" beside the learner needs .* `headrace doctor --plan` shows'):
        command(config(model, "vllm"))
