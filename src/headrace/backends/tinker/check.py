"""What the Tinker API cannot do is refused at start-up, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.backends.base import refuse_changed
from headrace.backends.local.token_losses import require_known_losses
from headrace.config import LoraSection, RunConfig
from headrace.errors import ConfigError

_IGNORED = (
    "run.deterministic", "model.dtype", "model.fast_path", "algorithm.value_head", "engine.prefill_tokens",
    "engine.threads", "engine.kept_tokens", "engine.weights", "backend.logits_chunk", "backend.share_prefixes",
    "backend.gradient_checkpointing", "backend.threads", "trainer.release_cache",
)  # fmt: skip
_STATE = "tinker://"


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for the first setting that cannot be honoured."""
    require_known_losses(config)
    for problem in _problems(config):
        raise ConfigError(problem)
    refuse_changed(config, *_IGNORED)


def _problems(config: RunConfig) -> Iterator[str]:
    section = config.tinker
    if config.engine.name not in ("tinker", "torch"):  # "torch" is the default, which says nothing
        yield f'backend "tinker" samples with engine "tinker", got "{config.engine.name}"; set engine.name = "tinker"'
    if config.model.lora != LoraSection():
        yield '[model.lora] does nothing with backend "tinker", whose adapters are the service\'s; set tinker.rank'
    if not (section.train_attn or section.train_mlp or section.train_unembed):
        yield "nothing would be trained; set tinker.train_attn, tinker.train_mlp or tinker.train_unembed"
    if section.state and not (section.state.startswith(_STATE) and "/weights/" in section.state):
        yield f'tinker.state must be tinker://RUN/weights/NAME, got "{section.state}"'
    if not section.state and not section.state_optimizer:
        yield "tinker.state_optimizer does nothing without tinker.state; remove it"
    yield from _sampling(config)
    yield from _distribution(config)


def _sampling(config: RunConfig) -> Iterator[str]:
    recompute = config.engine.cache_on_publish == "recompute"
    if recompute and config.tinker.segment_tokens is None:
        yield (
            'engine.cache_on_publish = "recompute" does nothing with one request per reply, which ends under the '
            "weights it began with; remove it or set tinker.segment_tokens"
        )
    if config.tinker.segment_tokens is not None and not recompute:
        yield (
            "tinker.segment_tokens computes a reply anew under new weights; say so with "
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
    others = bool(algorithm.kl.coef) or algorithm.objective == "dpo" or config.algorithm.estimator == "distill"
    if heat != 1.0 and others:
        yield (
            f"rollout.temperature is {heat:g}, and the service scores with a reference or a teacher at temperature 1 "
            f"only; set it to 1"
        )
