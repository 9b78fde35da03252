"""The engines of the local backend: one that shares its weights, or one in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from headrace.config import RunConfig
from headrace.engines.base import SamplingParams
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.engines.torch.engine import TorchEngine, usable_length
from headrace.errors import ConfigError
from headrace.models.causal import CausalModel
from headrace.models.tensor_threads import TensorThread

LocalEngine = TorchEngine | ProcessEngine
DETERMINISTIC_THREADS = 2
"""Where none are set: sums are cut into as many parts as there are threads, so their number is part of a result."""


def new_engine(
    config: RunConfig,
    hf_model: Any,
    model: CausalModel,
    tokenizer: Any,
    eos_ids: Sequence[int],
    learner: TensorThread | None = None,
) -> LocalEngine:
    """The engine that the configuration places beside the learner, whose thread it may share, or apart from it."""
    section, defaults = config.engine, SamplingParams(max_tokens=config.rollout.max_tokens)
    length = usable_length(model, section.max_model_length)
    if config.trainer.placement == "separate":
        options = EngineOptions(
            model=config.model,
            eos_ids=tuple(eos_ids),
            row_block=model.row_block,
            weights=section.weights,
            max_batch=section.max_batch,
            max_model_length=length,
            prefill_tokens=section.prefill_tokens,
            kept_tokens=section.kept_tokens,
            defaults=defaults,
            cache_on_publish=section.cache_on_publish,
            threads=_engine_threads(config),
        )
        return ProcessEngine(hf_model, options)
    return TorchEngine(
        model,
        eos_ids=eos_ids,
        detokenize=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        max_batch=section.max_batch,
        max_model_length=length,
        prefill_tokens=section.prefill_tokens,
        kept_tokens=section.kept_tokens,
        defaults=defaults,
        cache_on_publish=section.cache_on_publish,
        shared_thread=learner if takes_turns(config) else None,
    )


def takes_turns(config: RunConfig) -> bool:
    """Whether the engine has nothing to do while the learner works, and they may share a thread."""
    return config.trainer.placement == "colocate" and config.trainer.max_staleness == 0


def learner_threads(config: RunConfig) -> int:
    """Threads of the learner; 0 for the tensor library's own choice.

    Of a deterministic run the same on every machine, in every environment and placement.
    """
    if config.run.deterministic:
        return config.backend.threads or DETERMINISTIC_THREADS
    if config.backend.threads or config.trainer.placement == "colocate":
        return config.backend.threads
    return max(1, _cores() - _engine_threads(config))  # both with all cores would stand in each other's way


def check_threads(config: RunConfig) -> None:
    """With `run.deterministic` the number of threads must be what it is set to."""
    if config.run.deterministic:
        _require_threads(max(learner_threads(config), _engine_threads(config)))


def _require_threads(count: int) -> None:
    """OpenMP gives the threads that are asked for, unless its settings say otherwise."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    if os.environ.get("OMP_DYNAMIC", "").strip().lower() in ("true", "1"):
        found = f"OMP_DYNAMIC={os.environ['OMP_DYNAMIC']}"
    elif limit.strip().isdecimal() and int(limit) < count:
        found = f"OMP_THREAD_LIMIT={limit}"
    else:
        return
    raise ConfigError(
        f"run.deterministic computes with exactly {count} threads, and {found} may give it fewer; unset it, or set "
        f"backend.threads = 1"
    )


def _engine_threads(config: RunConfig) -> int:
    if config.run.deterministic:
        return config.engine.threads or learner_threads(config)
    return config.engine.threads or max(1, _cores() // 2)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
