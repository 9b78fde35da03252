"""Engine "sglang": samples on SGLang servers, which Headrace starts or which run already."""

from __future__ import annotations

import torch

from headrace.config import RunConfig
from headrace.engines.base import EngineAbilities, ModelHost, RolloutEngine
from headrace.engines.servers.checks import check_servers
from headrace.errors import ConfigError

_KNOWN = ("nccl", "disk")


class SglangEngines:
    """Makes a `SglangEngine`, or a pool of them."""

    def abilities(self, config: RunConfig) -> EngineAbilities:
        check_servers(config.engine, "SGLang")
        return EngineAbilities(
            transports=transports(config),
            exact_seeds=False,  # tokens near a tie depend on what else is in the batch
            pins=config.engine.servers > 1,  # one of several servers is kept back
            digests=False,
            pauses_to_sync=True,
            model_logprobs=False,
            cache_on_sync=("recompute",),
            routed_experts=True,
        )

    def __call__(self, config: RunConfig, host: ModelHost) -> RolloutEngine:
        from headrace.engines.sglang.build import build_engine

        return build_engine(config, host)


sglang_engine = SglangEngines()


def transports(config: RunConfig) -> tuple[str, ...]:
    """How weights can travel, the preferred way first."""
    asked = config.engine.transport
    if config.model.lora.rank:
        raise ConfigError(
            f'engine "sglang" is sent all weights, and model.lora.rank = {config.model.lora.rank} trains adapters; '
            f'set model.lora.rank = 0, or engine.name = "vllm"'
        )
    if asked is None:
        return ("nccl", "disk") if torch.cuda.is_available() else ("disk",)
    if asked not in _KNOWN:
        raise ConfigError(
            f'engine.transport = "{asked}" is not for engine "sglang", which takes weights by {" or ".join(_KNOWN)}; '
            f"leave it out, or set one of these"
        )
    return (asked,)
