"""Combinations of settings that make no sense: each is an error before anything starts, with the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from headrace.config import AlgorithmSection, DistillSection, DpoSection, RunConfig, Section, SftSection
from headrace.errors import ConfigError
from headrace.registry import builtin

GROUP_RELATIVE = ("grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl", "pkpo", "opo")

# Which losses or estimators read a knob: setting one that no chosen algorithm reads would do nothing.
_KNOBS = {
    "clip_low": ("loss", ("ppo_clip", "gspo", "cispo")),
    "clip_high": ("loss", ("ppo_clip", "gspo", "cispo")),
    "dual_clip": ("loss", ("ppo_clip", "gspo")),
    "dppo_delta": ("loss", ("dppo_tv", "dppo_kl")),
    "normalize_by_std": ("estimator", ("grpo",)),
    "pass_k": ("estimator", ("pkpo",)),
    "gamma": ("estimator", ("gae",)),
    "gae_lambda": ("estimator", ("gae",)),
    "value_coef": ("estimator", ("gae",)),
}


def check_combinations(config: RunConfig) -> None:
    """Raise ConfigError with every problem found."""
    problems = [problem for rule in _RULES for problem in rule(config)]
    if problems:
        raise ConfigError("; ".join(problems))


def chosen(algorithm: AlgorithmSection, kind: str) -> set[str]:
    """Names of the estimators or losses that the run uses, over all roles."""
    own = {getattr(role, kind) for role in algorithm.roles.values()}
    return {getattr(algorithm, kind), *(name for name in own if name)}


def _changed(section: Section, key: str) -> bool:
    return getattr(section, key) != type(section).model_fields[key].get_default()


def _groups(config: RunConfig) -> Iterator[str]:
    algorithm, size = config.algorithm, config.rollout.group_size
    if algorithm.objective == "rl":
        for name in sorted(chosen(algorithm, "estimator") & set(GROUP_RELATIVE)):
            if size < 2:
                yield (
                    f"rollout.group_size must be at least 2 for {name}, got {size}; "
                    f'raise rollout.group_size or use estimator "reinforce"'
                )
        if "pkpo" in chosen(algorithm, "estimator") and algorithm.pass_k >= size:
            yield (
                f"algorithm.pass_k is {algorithm.pass_k} with rollout.group_size {size}: every rollout would get the "
                f"same credit; lower pass_k or raise the group size"
            )
        if config.rollout.temperature == 0:
            yield "rollout.temperature must be above 0 to train, got 0; greedy rollouts do not explore"
        if config.filters.min_trajectories > size:
            yield f"filters.min_trajectories is {config.filters.min_trajectories}, more than rollout.group_size {size}"


def _preferences(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.objective != "dpo":
        if "dpo" in chosen(algorithm, "loss"):
            yield 'loss "dpo" needs pairs; set algorithm.objective = "dpo"'
        if config.dpo != DpoSection():
            yield 'the section [dpo] does nothing unless algorithm.objective = "dpo"; remove it or set the objective'
        return
    if config.rollout.group_size < 2 and config.workflow.name != "preference":
        yield (
            f"dpo pairs the best with the worst of a group, and rollout.group_size is {config.rollout.group_size}; "
            f'raise it to 2 or more, or read pairs from a file with workflow.name = "preference"'
        )
    for key in ("estimator", "loss", "roles", "value_head", "entropy_coef", "aggregation"):
        if _changed(algorithm, key) and not (key == "loss" and algorithm.loss == "dpo"):
            yield f"algorithm.{key} does nothing with objective dpo; remove it"
    if algorithm.use_precomputed_advantage:
        yield "algorithm.use_precomputed_advantage does nothing with objective dpo, which uses no advantages; remove it"
    if algorithm.correction.name != "none":
        yield f'algorithm.correction "{algorithm.correction.name}" does nothing with objective dpo; remove it'
    if algorithm.kl.coef:
        yield "algorithm.kl does nothing with objective dpo, whose beta pulls to the reference; set dpo.beta instead"


def _supervision(config: RunConfig) -> Iterator[str]:
    if config.algorithm.objective == "sft":
        for key in ("estimator", "loss", "correction", "kl", "roles", "value_head", "use_precomputed_advantage"):
            if _changed(config.algorithm, key):
                yield f"algorithm.{key} does nothing with objective sft; remove it"
        if config.sft.coef:
            yield "the section [sft] mixes demonstrations into reinforcement learning; with objective sft use [data]"
    elif config.sft.coef and not config.sft.tasks:
        yield "sft.coef is set, but sft.tasks is empty; name where the demonstrations come from"
    elif config.sft != SftSection() and not config.sft.coef:
        yield "the section [sft] does nothing while sft.coef is 0; set it or remove the section"


def _ratios(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    correction = algorithm.correction
    if correction.name != "none" and algorithm.proximal != "recompute":
        yield (
            f'correction "{correction.name}" compares the sampler with the learner\'s own log-probabilities, which '
            f'algorithm.proximal = "sampler" does not compute; set algorithm.proximal = "recompute"'
        )
    if correction.low >= correction.high:
        yield f"correction.low {correction.low:g} must be below correction.high {correction.high:g}"
    if correction.level == "sequence" and correction.name not in ("tis", "none"):
        yield f'correction.level "sequence" is for tis, got "{correction.name}"; remove it'


def _values(config: RunConfig) -> Iterator[str]:
    wanted = "gae" in chosen(config.algorithm, "estimator")
    if wanted and not config.algorithm.value_head:
        yield 'estimator "gae" needs a value head; set algorithm.value_head = true'
    if config.algorithm.value_head and not wanted:
        yield 'algorithm.value_head does nothing without estimator "gae"; remove it'


def _teaching(config: RunConfig) -> Iterator[str]:
    distilled = "distill" in chosen(config.algorithm, "estimator")
    built_in = config.workflow.name in builtin("workflow")  # a user's own may be under self_distill
    if config.distill != DistillSection() and built_in and not distilled:
        yield (
            'the section [distill] does nothing: set algorithm.estimator = "distill", or use a workflow of your own '
            "under self_distill"
        )
    if config.distill.refresh_every and config.distill.teacher != "initial":
        yield 'distill.refresh_every copies the policy into the teacher, which needs distill.teacher = "initial"'


def _knobs(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.objective != "rl":
        return
    for knob, (kind, readers) in _KNOBS.items():
        names = chosen(algorithm, kind)
        own = any(":" in name for name in names)  # a user's own may read anything
        if _changed(algorithm, knob) and not own and not names & set(readers):
            used = ", ".join(sorted(names))
            yield f"algorithm.{knob} is read by {kind} {', '.join(readers)}, not by {used}; remove it"


def _modes(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantage_mode == "per_step":
        warnings.warn(
            'algorithm.advantage_mode = "per_step" is gone and does what "broadcast" does; to compare step by step '
            'set workflow.grouping = "by_step"',
            DeprecationWarning,
            stacklevel=4,
        )
    yield from ()


_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _groups,
    _preferences,
    _supervision,
    _ratios,
    _values,
    _teaching,
    _knobs,
    _modes,
)
