"""Engine "vllm": samples on vLLM servers, which Headrace starts or which run already."""

from __future__ import annotations

from urllib.parse import urlsplit

import torch

from headrace.config import RunConfig
from headrace.config.derived import places_engines, places_learners, shares_bundles
from headrace.engines.base import EngineAbilities, ModelHost, RolloutEngine
from headrace.engines.servers.checks import check_servers
from headrace.errors import ConfigError
from headrace.utils.loopback import is_loopback


class VllmEngines:
    """Makes a `VllmEngine`, or a pool of them."""

    def abilities(self, config: RunConfig) -> EngineAbilities:
        check_servers(config.engine, "vLLM")
        lora = bool(config.model.lora.rank)
        return EngineAbilities(
            transports=transports(config),
            exact_seeds=False,  # tokens near a tie depend on what else is in the batch
            pins=lora
            or config.engine.servers > 1,  # adapters are served side by side; of several servers, one is kept back
            digests=False,
            pauses_to_sync=True,
            model_logprobs=False,
            cache_on_sync=("keep",) if lora else ("keep", "recompute"),
            in_flight=not lora,
            routed_experts=True,
        )

    def __call__(self, config: RunConfig, host: ModelHost) -> RolloutEngine:
        from headrace.engines.vllm.build import build_engine

        return build_engine(config, host)


vllm_engine = VllmEngines()


def transports(config: RunConfig) -> tuple[str, ...]:
    """How weights can travel, the preferred way first."""
    asked, lora = config.engine.transport, bool(config.model.lora.rank)
    if asked == "adapter" and not lora:
        raise ConfigError(
            'engine.transport = "adapter" sends LoRA adapters, and model.lora.rank is 0; set model.lora.rank, or leave '
            "engine.transport out"
        )
    if lora:
        if asked not in (None, "adapter"):
            raise ConfigError(
                f'engine.transport = "{asked}" sends all weights, and model.lora.rank = {config.model.lora.rank} '
                f'trains only adapters; leave engine.transport out, or set it to "adapter"'
            )
        return ("adapter",)
    if asked == "ipc" and config.trainer.placement == "separate":
        raise ConfigError(
            'engine.transport = "ipc" is for learner and engine on one GPU, and trainer.placement is "separate"; '
            'set it to "nccl", or trainer.placement to "colocate"'
        )
    if asked in ("ipc", "nccl") and not (torch.cuda.is_available() or places_learners(config)):
        raise ConfigError(
            f'engine.transport = "{asked}" sends from a GPU, and this machine has none; set it to "file" or "gloo"'
        )
    if asked:
        return (asked,)
    if torch.cuda.is_available():
        return ("ipc",) if config.trainer.placement == "colocate" else ("nccl",)
    elsewhere = places_engines(config) or shares_bundles(config)
    local = not elsewhere and all(is_loopback(urlsplit(url).hostname or "") for url in config.engine.urls)
    return ("file", "gloo") if local else ("gloo",)
