"""A dry run refuses what a start would refuse before it reads tasks and loads weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace import UnifiedTrainer
from headrace.cli.main import run
from headrace.config.loading import load_config
from headrace.errors import HeadraceError
from headrace.models import load

TASK = {"workflow.name": "single_turn", "workflow.judger": "countdown", "data.tasks": "countdown"}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is refused without a GPU")
REFUSED = {
    "a number of the CPU": ({"model.device": "cpu:3"}, 'write "cpu" instead of "cpu:3"'),
    "a device that is not there": ({"model.device": "xpu:7"}, 'model.device = "xpu:7" is not available here'),
    "a kernel of another device": (
        {"model.device": "cpu", "model.attention": "varlen", "model.fast_path": False},
        'model.attention = "varlen" is a kernel for CUDA, and the model is on cpu; set it to "auto"',
    ),
    "attention where there is none to choose": (
        {"model.device": "cpu", "model.attention": "sdpa"},
        "the model runs through Headrace's own forward pass on the CPU; remove it, or set model.fast_path = false",
    ),
    "a type narrower than the model's": (
        {"model.dtype": "float32", "optimizer.master_dtype": "bfloat16"}, "is narrower than the float32"
    ),
    "a sequence longer than the model reads": (
        {"engine.max_model_length": 100000}, "engine.max_model_length is 100000, but the model reads no more than"
    ),
    "compiling the fast path": ({"model.device": "cpu", "engine.compile": True}, "engine.compile is for the forward"),
    "several engines in one process": ({"engine.replicas": 2}, "engine.replicas = 2"),
    "shards that do not divide the ranks": (
        {"backend.name": "fsdp", "backend.ranks": 4, "backend.shard": 3, "trainer.placement": "separate"},
        "backend.shard = 3",
    ),
    "an interpreter that is not there": (
        {"engine.name": "vllm", "engine.python": "/no/such/python"}, 'engine.python = "/no/such/python" is not there'
    ),
    "an interpreter that is a file": (
        {"engine.name": "vllm", "engine.python": __file__}, 'test_dry_run.py" cannot be executed'
    ),
    "memory of one GPU between two": (
        {"engine.name": "vllm", "engine.transport": "ipc", "trainer.placement": "separate"}, 'set it to "nccl"'
    ),
    "a transport of GPUs": ({"engine.name": "vllm", "engine.transport": "nccl"}, "this machine has none"),
    "GPUs of too few servers": (
        {"engine.name": "vllm", "engine.gpus": ["0"], "engine.replicas": 2, "trainer.placement": "separate"},
        "engine.gpus names the GPUs of 1 servers, and engine.replicas is 2",
    ),
    "a variable that is not set": (
        {"engine.name": "sglang", "engine.server_env.KEY": "$NO_SUCH_VARIABLE"}, "not in the environment"
    ),
    "no key of the service": (
        {"backend.name": "tinker", "tinker.api_key_env": "NO_SUCH_KEY", "tinker.model": "m"}, "NO_SUCH_KEY"
    ),
    "no reward": ({"workflow.judger": ""}, 'workflow "single_turn" gives no reward and there is no judger'),
}  # fmt: skip


@NO_GPU
@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_refuses_what_a_start_refuses(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.setattr(load, "load_model", lambda section: pytest.fail("weights were loaded"))
    changed, said = REFUSED[case]
    Path("run.toml").touch()
    words = [f"--{key}={json.dumps(value)}" for key, value in (TASK | changed).items()]
    assert run(["train", "run.toml", "--dry-run", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    with pytest.raises(HeadraceError) as refused:
        UnifiedTrainer(load_config("run.toml", words)).fit()
    assert said in str(refused.value)
