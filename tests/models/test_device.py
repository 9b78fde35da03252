"""Which device and types a run computes with, and what is said where they cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.backend_contract import IMITATE, random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.local.learner import Learner
from headrace.backends.local.numerics import numerics
from headrace.config import RunConfig
from headrace.config.compatibility import check_branching, check_resume
from headrace.config.loading import build_config
from headrace.errors import ConfigError
from headrace.models.device import CPU, forward_dtype, master_dtype, prepare, resolve_device

NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def on_cpu(**sections: Any) -> RunConfig:
    sections["model"] = {"device": "cpu", **sections.get("model", {})}
    return build_config(sections)


@NO_GPU
def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    assert resolve_device("auto") == CPU
    assert forward_dtype(RunConfig().model) == torch.float32


@NO_GPU
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cuda", r'model.device = "cuda" is not available here: torch sees no accelerator.*set model.device = "auto"'),
        ("cuda:1", 'model.device = "cuda:1" is not available here'),
        ("tpu", 'there is no such device; use "auto", "cpu", "cuda", "xpu", "mps"'),
    ],
)
def test_a_device_that_is_not_there_is_named_with_a_remedy(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_device(name)


@pytest.mark.parametrize("name", ["CUDA", "cuda:", "cuda:x", "cuda 1", ""])
def test_what_is_no_name_of_a_device_is_refused_in_the_file(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.device"):
        build_config({"model": {"device": name}})


@pytest.mark.parametrize(
    ("dtype", "master", "found"),
    [
        ("auto", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),  # on the CPU, as it always was
        ("bfloat16", "float32", torch.float32),
        ("float64", "auto", torch.float64),
    ],
)
def test_the_optimizer_s_type_on_the_cpu(dtype: str, master: str, found: torch.dtype) -> None:
    config = on_cpu(model={"dtype": dtype}, optimizer={"master_dtype": master})
    assert master_dtype(config.model, config.optimizer) == found


def test_masters_narrower_than_the_model_are_refused() -> None:
    config = on_cpu(optimizer={"master_dtype": "bfloat16"})
    with pytest.raises(
        ConfigError, match=r'master_dtype = "bfloat16" is narrower than the float32.*leave it at "auto"'
    ):
        master_dtype(config.model, config.optimizer)


def trained(config: RunConfig, steps: int = 20, rate: float = 1e-4) -> float:
    torch.set_num_threads(1)
    learner = Learner(config)
    batch = pack(random_samples(6, 90), IMITATE, 60)
    loss = 0.0
    for _ in range(steps):
        loss = learner.forward_backward(batch, IMITATE).metrics.reduce()["policy/loss"]
        learner.optim_step(rate, grad_scale([batch], IMITATE))
    return loss


def test_small_steps_add_up_in_masters_as_they_do_in_float32() -> None:
    wide = trained(on_cpu(model={"fast_path": False}))
    masters = trained(on_cpu(model={"dtype": "bfloat16"}, optimizer={"master_dtype": "float32"}))
    without = trained(on_cpu(model={"dtype": "bfloat16"}))
    assert abs(masters - wide) < 0.1 < abs(without - wide)


def test_attention_is_refused_where_the_fast_path_has_its_own() -> None:
    with pytest.raises(ConfigError, match=r'model.attention = "sdpa" has no effect.*model.fast_path = false'):
        Learner(on_cpu(model={"attention": "sdpa"}))


def test_a_run_says_what_it_computes_with_unless_there_was_nothing_to_choose() -> None:
    assert Learner(on_cpu()).where == ""
    assert Learner(on_cpu(model={"fast_path": False})).where == (
        "cpu in float32 (optimizer: float32), attention: torch's attention, rows in bins of similar length"
    )


def test_a_run_is_resumed_on_another_device_in_another_type_unless_it_is_deterministic() -> None:
    stored = on_cpu().model_dump(mode="json")
    moved = build_config({"model": {"device": "cuda", "dtype": "bfloat16"}, "optimizer": {"offload": True}})
    (note,) = check_resume(stored, moved, Path("runs/x"), True)
    assert 'model.device: "cpu" → "cuda"' in note and 'model.dtype: "auto" → "bfloat16"' in note
    assert check_branching(stored, moved, Path("runs/x"))
    exact = {"run": {"deterministic": True}}
    with pytest.raises(ConfigError, match=r'model.device: "cpu" → "cuda"'):
        check_resume(on_cpu(**exact).model_dump(mode="json"), build_config({**exact, "model": {"device": "cuda"}}),
                     Path("runs/x"), True)  # fmt: skip


def test_another_base_is_no_change_that_a_checkpoint_survives() -> None:
    stored = on_cpu(model={"lora": {"rank": 4}}).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"model\.quantize"):
        check_branching(stored, on_cpu(model={"lora": {"rank": 4}, "quantize": "nf4"}), Path("runs/x"))


def test_numerics_name_the_device_only_where_there_is_one() -> None:
    assert "device" not in numerics(on_cpu())


def test_the_cpu_needs_no_settings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare(CPU, tf32=True, deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()
