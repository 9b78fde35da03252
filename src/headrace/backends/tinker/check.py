"""What the Tinker API cannot do is refused at start-up, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.backends.base import refuse_changed
from headrace.backends.local.token_losses import require_known_losses
from headrace.config import RunConfig
from headrace.config.derived import asks_teacher
from headrace.errors import ConfigError
from headrace.registry import facts

_STATE = "tinker://"


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for the first setting that cannot be honoured."""
    require_known_losses(config)
    for problem in _problems(config):
        raise ConfigError(problem)
    without = () if facts("backend", "tinker").value_head else ("algorithm.value_head",)
    refuse_changed(config, "run.deterministic", *without)


def _problems(config: RunConfig) -> Iterator[str]:
    section = config.tinker
    if not (section.train_attn or section.train_mlp or section.train_unembed):
        yield "nothing would be trained; set tinker.train_attn, tinker.train_mlp or tinker.train_unembed"
    if section.state and not (section.state.startswith(_STATE) and "/weights/" in section.state):
        yield f'tinker.state must be tinker://RUN/weights/NAME, got "{section.state}"'
    yield from _sampling(config)
    yield from _distribution(config)


def _sampling(config: RunConfig) -> Iterator[str]:
    if config.tinker.segment_tokens is not None and config.engine.cache_on_publish != "recompute":
        yield (
            "tinker.segment_tokens computes a reply again under new weights; say so with "
            'engine.cache_on_publish = "recompute"'
        )


def _distribution(config: RunConfig) -> Iterator[str]:
    """The service returns log-probabilities of given tokens at temperature 1."""
    algorithm, heat, whole = config.algorithm, config.rollout.temperature, config.tinker.vocabulary is not None
    if algorithm.entropy_coef and not whole:
        yield (
            f"algorithm.entropy_coef is {algorithm.entropy_coef:g}, and the service returns no entropy; remove it, or "
            f"set tinker.vocabulary (if it is small)"
        )
    if algorithm.objective == "sft":
        return
    if heat != 1.0 and not whole:
        yield (
            f"rollout.temperature is {heat:g}, and the service trains at temperature 1 only; set it to 1, or set "
            f"tinker.vocabulary (if it is small)"
        )
    others = bool(algorithm.kl.coef) or algorithm.objective == "dpo" or asks_teacher(algorithm)
    if heat != 1.0 and others:
        yield (
            f"rollout.temperature is {heat:g}, and the service scores with a reference or a teacher at temperature 1 "
            f"only; set it to 1"
        )
