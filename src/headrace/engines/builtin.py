"""Engine "torch": in the learner's process on the learner's own tensors, or in one or several of its own."""

from __future__ import annotations

from typing import TypeVar

from headrace.config import RunConfig
from headrace.config.derived import places_engines
from headrace.engines.base import EngineAbilities, ModelHost, RolloutEngine, SamplingParams
from headrace.engines.placement import DETERMINISTIC_ROWS, engine_threads, takes_turns
from headrace.engines.pool import EnginePool
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.engines.torch.engine import TorchEngine, usable_length
from headrace.errors import ConfigError
from headrace.registry import load_object
from headrace.weights.in_place import InPlace
from headrace.weights.shared_memory import SharedBuffers


class BuiltinEngine:
    """Makes a `TorchEngine`, a `ProcessEngine` or a pool of these, by `trainer.placement` and `engine.replicas`."""

    def abilities(self, config: RunConfig) -> EngineAbilities:
        separate = config.trainer.placement == "separate"
        if config.engine.replicas > 1 and not separate:
            raise ConfigError(
                f'engine.replicas = {config.engine.replicas} of engine "torch" are processes of their own, and '
                f'trainer.placement = "{config.trainer.placement}" keeps the engine in the learner\'s; set '
                f'trainer.placement = "separate", or engine.replicas = 1'
            )
        return EngineAbilities(("shared_memory",) if separate else ("in_place",))

    def __call__(self, config: RunConfig, host: ModelHost) -> RolloutEngine:
        return (_in_process if config.trainer.placement == "separate" else _in_place)(config, host)


torch_engine = BuiltinEngine()
S = TypeVar("S")


def _in_place(config: RunConfig, host: ModelHost) -> TorchEngine:
    section, given = config.engine, _sender(host, InPlace)
    given.model.decode_with(section.weights)
    if section.compile:
        given.model.compile_decoding()
    return TorchEngine(
        given.model,
        eos_ids=host.eos_ids,
        detokenize=lambda ids: host.tokenizer.decode(list(ids), skip_special_tokens=True),
        max_batch=section.max_batch,
        max_model_length=section.max_model_length,
        prefill_tokens=section.prefill_tokens,
        kept_tokens=section.kept_tokens,
        defaults=_defaults(config),
        cache_on_publish=section.cache_on_publish,
        shared_thread=given.thread if takes_turns(config) else None,
        scoring=given.scoring,
    )


def _in_process(config: RunConfig, host: ModelHost) -> RolloutEngine:
    section, length = config.engine, config.engine.max_model_length
    if host.max_length is not None:  # checked here, before a process is started
        length = usable_length(host.max_length, length)
    options = EngineOptions(
        model=config.model,
        eos_ids=host.eos_ids,
        row_block=DETERMINISTIC_ROWS if config.run.deterministic else 0,
        weights=section.weights,
        compile=section.compile,
        max_batch=section.max_batch,
        max_model_length=length,
        prefill_tokens=section.prefill_tokens,
        kept_tokens=section.kept_tokens,
        defaults=_defaults(config),
        cache_on_publish=section.cache_on_publish,
        threads=engine_threads(config),
    )
    weights = _sender(host, SharedBuffers)
    weights.grow(section.replicas)
    if places_engines(config):
        return load_object("headrace.engines.process.placed:placed_engines")(config, weights, options)
    if section.replicas == 1:
        return ProcessEngine(weights, options)
    return EnginePool([ProcessEngine(weights, options, waits=False) for _ in range(section.replicas)])


def _sender(host: ModelHost, kind: type[S]) -> S:
    """The backend's sender, which a backend of one's own may have made of anything."""
    if not isinstance(host.sender, kind):
        raise ConfigError(
            f'engine "torch" needs a backend whose sender is {kind.__module__}:{kind.__name__}, got '
            f"{type(host.sender).__name__}; return one from the backend's host(), or set engine.name to another engine"
        )
    return host.sender


def _defaults(config: RunConfig) -> SamplingParams:
    return SamplingParams(max_tokens=config.rollout.max_tokens)
