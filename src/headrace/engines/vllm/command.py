"""How Headrace starts a vLLM server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.models.catalog import resolve_model
from headrace.weights.vllm_plugin import FOLDER

BACKENDS = {"file": "headrace_file", "gloo": "headrace_gloo", "nccl": "nccl", "ipc": "ipc"}
"""By transport, the name of the receiving end in vLLM."""
MODEL = "policy"
"""Under which the model is served."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with."""

    python: str | None
    model: str
    dtype: str
    transport: str
    max_length: int | None
    max_batch: int
    prefill_tokens: int
    sleeps: bool
    """Whether it gives its memory back while the learner works."""
    threads: int
    lora_rank: int = 0
    lora_slots: int = 4
    routed_experts: bool = False
    memory_share: float | None = None
    """Of the GPU's memory; None leaves it to vLLM."""
    tokenizer: bool = True
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    token: str = ""
    """What callers must have; empty on loopback."""

    def listening(self, host: str, token: str) -> Launch:
        """The same on an address that others reach."""
        return replace(self, host=host, token=token)

    def command(self, port: int) -> Sequence[str]:
        options: dict[str, object] = {
            "model": resolve_model(self.model),
            "served-model-name": MODEL,
            "host": self.host,
            "middleware": "headrace_vllm.token.RequireToken" if self.token else None,
            "port": port,
            "dtype": self.dtype,
            "max-num-seqs": self.max_batch,
            "logprobs-mode": "processed_logprobs",  # under the distribution that was sampled from
            "enable-scale-out": True,  # tokens in, tokens out
            "scheduling-policy": "priority",  # pinned requests go first
            "max-model-len": self.max_length,
            "max-num-batched-tokens": max(self.prefill_tokens, self.max_length or 0, self.max_batch),
            "enable-sleep-mode": self.sleeps,
            "gpu-memory-utilization": self.memory_share,
            "skip-tokenizer-init": not self.tokenizer,
            "enable-return-routed-experts": self.routed_experts,
            "enable-lora": bool(self.lora_rank),
            "max-lora-rank": _rank(self.lora_rank) if self.lora_rank else None,
            "max-loras": self.lora_slots if self.lora_rank else None,
            "max-cpu-loras": 2 * self.lora_slots if self.lora_rank else None,
        }
        if backend := BACKENDS.get(self.transport):
            options["weight-transfer-config"] = json.dumps({"backend": backend})
        made = [self.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in options.items():
            if value is None or value is False or f"--{name}" in self.arguments:  # one's own argument wins
                continue
            made += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return [*made, *self.arguments]

    def environment(self) -> dict[str, str]:
        mine = {
            "VLLM_SERVER_DEV_MODE": "1",  # the routes of weight sync, sleep and pause
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("HEADRACE_SERVER_PYTHONPATH")))),
        }
        if self.token:
            mine["HEADRACE_TOKEN"] = self.token
        if self.transport == "ipc":
            mine["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory come pickled
        if self.lora_rank:
            mine["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.threads:
            mine |= {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        return {**os.environ, **mine, **self.variables}


def _rank(rank: int) -> int:
    """The smallest that vLLM knows and that is enough."""
    return next((known for known in (1, 8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)
