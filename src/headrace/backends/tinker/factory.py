"""Engine "tinker": samples from the weights of backend "tinker", which stay on the service."""

from __future__ import annotations

from typing import cast

from headrace.backends.tinker.engine import TinkerEngine
from headrace.backends.tinker.sender import TinkerPath
from headrace.backends.tinker.service import base_model
from headrace.config import RunConfig
from headrace.engines.base import EngineAbilities, ModelHost, SamplingParams
from headrace.errors import ConfigError


class TinkerEngines:
    """Makes a `TinkerEngine`."""

    def abilities(self, config: RunConfig) -> EngineAbilities:
        # the service takes seeds, and does not promise to use them
        return EngineAbilities(("tinker_path",), exact_seeds=False)

    def __call__(self, config: RunConfig, host: ModelHost) -> TinkerEngine:
        tokenizer = host.tokenizer
        return TinkerEngine(
            cast(TinkerPath, host.sender),
            vocabulary=config.tinker.vocabulary or len(tokenizer),
            max_model_length=_usable_length(config, host.max_length),
            eos_ids=host.eos_ids,
            detokenize=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
            token_text=lambda token: tokenizer.decode([token]),
            max_batch=config.engine.max_batch,
            defaults=SamplingParams(max_tokens=config.rollout.max_tokens),
            segment_tokens=config.tinker.segment_tokens,
        )


tinker_engine = TinkerEngines()


def _usable_length(config: RunConfig, longest: int | None) -> int:
    wanted = config.engine.max_model_length
    if wanted is None and longest is None:
        raise ConfigError(
            f'the service does not say how much "{base_model(config)}" reads; set engine.max_model_length'
        )
    if wanted is not None and longest is not None and wanted > longest:
        raise ConfigError(
            f"engine.max_model_length is {wanted}, but the service reads no more than {longest} tokens; lower it, or "
            f"leave it out to take the service's limit"
        )
    # scoring a row samples one token after it, which must fit as well
    return wanted or (longest or 1) - 1
