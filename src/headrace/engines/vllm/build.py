"""From a configuration to an engine of vLLM servers."""

from __future__ import annotations

import os

import torch

from headrace.config import RunConfig
from headrace.engines.base import ModelHost, RolloutEngine
from headrace.engines.placement import engine_threads
from headrace.engines.servers.build import ServerKind, build_servers, memory_share
from headrace.engines.servers.checks import interpreter
from headrace.engines.servers.life import ServerOptions
from headrace.engines.vllm.command import Launch
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.factory import transports
from headrace.utils.child_environment import expanded


def build_engine(config: RunConfig, host: ModelHost) -> RolloutEngine:
    """One engine per server; the sender is bound to where they are."""
    return build_servers(config, host, ServerKind("vllm", "vLLM", VllmEngine, new_launch, transports))


def new_launch(config: RunConfig, options: ServerOptions) -> Launch:
    """How the servers of a run are started."""
    section = config.engine
    cpu = {} if torch.cuda.is_available() else _CPU | {k: v for k, v in os.environ.items() if k in _CPU}
    return Launch(
        python=interpreter(section.python, "vLLM"),
        model=config.model.name,
        dtype=config.model.dtype,
        transport=options.transport,
        max_length=options.max_model_length + 1,  # scoring a row samples one token behind it
        max_batch=section.max_batch,
        prefill_tokens=section.prefill_tokens,
        sleeps=options.sleeps and not cpu,  # its CPU build refuses the option, and answers the calls
        threads=engine_threads(config) if cpu else section.threads,
        lora_rank=config.model.lora.rank,
        routed_experts=options.routed_experts,
        memory_share=memory_share(config, "--gpu-memory-utilization"),
        arguments=(*(("--enforce-eager",) if cpu else ()), *section.server_args),
        variables={**cpu, **expanded(section.server_env, "engine.server_env")},
    )


_CPU = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
