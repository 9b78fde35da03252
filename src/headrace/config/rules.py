"""Combinations of settings that contradict each other: each is an error before anything starts, with the remedy.

Settings without effect are refused, too; the sections themselves declare those.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter

from headrace.config import RunConfig, TrainerSection
from headrace.config.derived import (
    chosen,
    cut_problem,
    estimator_facts,
    has_own,
    loss_facts,
    losses_without_ratio,
    places_engines,
    reads_pairs,
    rolls_out,
    shares_bundles,
)
from headrace.config.effect import idle_settings
from headrace.config.secrets import exposed_secrets
from headrace.errors import ConfigError
from headrace.registry import facts, is_loaded


def check_settings(
    config: RunConfig, objects: Collection[str] | None = None, begun_with: RunConfig | None = None
) -> None:
    """Raise ConfigError with every contradiction and every setting without effect.

    `objects` are given in place of names. `begun_with` is the stored configuration of a run that is resumed: what it
    was started with is accepted, or a newer version of Headrace could not resume it.
    """
    accepted = problems_of(begun_with, objects) if begun_with is not None else ()
    _refuse([problem for problem in problems_of(config, objects) if problem not in accepted])


def problems_of(config: RunConfig, objects: Collection[str] | None = None) -> list[str]:
    """Contradictions and settings without effect, a sentence each."""
    return [*impossible(config), *(idle.text for idle in idle_settings(config, objects))]


def impossible(config: RunConfig) -> list[str]:
    """Contradictions between settings, a sentence each."""
    return [problem for rule in _RULES for problem in rule(config)]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))


def warn_of_long_intervals(config: RunConfig) -> None:
    """Warn of what the run is too short for. It is no error: `--trainer.steps 2` tries a run file out."""
    trainer = config.trainer
    if trainer.save_every > trainer.steps:
        warnings.warn(
            f"trainer.save_every = {trainer.save_every} is above trainer.steps = {trainer.steps}: "
            f"it saves no checkpoint on the way",
            stacklevel=3,
        )
    if config.eval.every >= max(trainer.steps, 2):  # after the last step eval.after decides
        warnings.warn(
            f"eval.every = {config.eval.every} evaluates nothing before the end: the run has {trainer.steps} steps",
            stacklevel=3,
        )


def _groups(config: RunConfig) -> Iterator[str]:
    algorithm, size = config.algorithm, config.rollout.group_size
    if algorithm.objective == "rl":
        for name, declared in estimator_facts(algorithm).items():
            if declared.group_relative and size < 2:
                yield (
                    f"rollout.group_size must be at least 2 for {name}, got {size}; "
                    f'raise rollout.group_size or use estimator "reinforce"'
                )
        if "pkpo" in chosen(algorithm, "estimator") and algorithm.pass_k >= size:
            yield (
                f"algorithm.pass_k is {algorithm.pass_k} with rollout.group_size {size}: every rollout would get the "
                f"same credit; lower pass_k or raise the group size"
            )
    if rolls_out(config) and config.rollout.temperature == 0:
        yield "rollout.temperature must be above 0 to train, got 0; greedy rollouts are all the same"


def _filters(config: RunConfig) -> Iterator[str]:
    least, size = config.filters.min_trajectories, config.rollout.group_size
    if not rolls_out(config):
        size = 2 if reads_pairs(config) else 1
    if least > size:
        remedy = "lower it or raise rollout.group_size" if rolls_out(config) else "lower it"
        yield f"filters.min_trajectories is {least}, and a group has {size}: all would be dropped; {remedy}"


def _preferences(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.objective != "dpo":
        for name, declared in loss_facts(algorithm).items():
            if declared.needs_pairs:
                yield f'loss "{name}" needs pairs; set algorithm.objective = "dpo"'
        return
    if config.rollout.group_size < 2 and config.workflow.name != "preference":
        yield (
            f"dpo pairs the best with the worst of a group, and rollout.group_size is {config.rollout.group_size}; "
            f'raise it to 2 or more, or read pairs from a file with workflow.name = "preference"'
        )


def _supervision(config: RunConfig) -> Iterator[str]:
    if config.algorithm.objective != "rl" or not config.sft.coef:
        return
    if config.trainer.updates_per_batch > 1:
        yield "sft.coef goes with one update per batch, got trainer.updates_per_batch above 1; set it to 1"
    if not config.sft.tasks:
        yield "sft.coef is set, but sft.tasks is empty; name where the demonstrations come from"


def _ratios(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    correction = algorithm.correction
    if correction.name != "none" and algorithm.proximal != "recompute":
        yield (
            f'correction "{correction.name}" compares the sampler with the learner\'s own log-probabilities, which '
            f'algorithm.proximal = "sampler" does not compute; set algorithm.proximal = "recompute"'
        )
    if "high" in facts("correction", correction.name).settings and correction.low >= correction.high:
        yield f"correction.low {correction.low:g} must be below correction.high {correction.high:g}"


def _clipping(config: RunConfig) -> Iterator[str]:
    if config.algorithm.clip_low > 1:
        yield (
            f"algorithm.clip_low must be at most 1, got {config.algorithm.clip_low:g}: the ratio is clipped below "
            f"1 - clip_low, and a ratio is never below 0; 1 turns this side of the clip off"
        )


def _warm_up(config: RunConfig) -> Iterator[str]:
    steps = config.optimizer.warmup_steps
    if steps > config.trainer.steps:
        yield (
            f"optimizer.warmup_steps is {steps}, and the run has {config.trainer.steps} steps: the learning rate would "
            f"never reach optimizer.lr; lower it, or set optimizer.warmup_ratio instead"
        )


def _decay(config: RunConfig) -> Iterator[str]:
    section = config.optimizer
    if section.schedule != "constant" and section.min_lr_ratio == 1:
        yield (
            f'optimizer.schedule = "{section.schedule}" with optimizer.min_lr_ratio = 1 never lowers the learning '
            f'rate; lower the ratio, or set optimizer.schedule = "constant" without it'
        )


def _judging(config: RunConfig) -> Iterator[str]:
    if config.workflow.judger and config.judge.routes:
        yield f'both workflow.judger ("{config.workflow.judger}") and judge.routes are set; keep one of them'


def _placing(config: RunConfig) -> Iterator[str]:
    if config.judge.placement == "ray" and not config.cluster.address:
        yield (
            'judge.placement = "ray" needs a cluster, and cluster.address is empty; set it to "auto", "local" or the '
            "address of one"
        )
    on_ray = places_engines(config) or shares_bundles(config)
    if on_ray and config.engine.name == "sglang":
        yield (
            'engine "sglang" is not started on a cluster; start its servers on their nodes and name them in '
            'engine.urls, or set engine.name = "vllm" or "torch"'
        )
    if on_ray and config.engine.name == "vllm" and config.model.lora.rank:
        yield (
            f"model.lora.rank = {config.model.lora.rank} sends adapters to vLLM through a folder of this machine, "
            f"which servers on a cluster do not see; set model.lora.rank = 0, or cluster.engine = {{}} with "
            f'trainer.placement = "separate"'
        )


def _sampled_otherwise(config: RunConfig) -> Iterator[str]:
    """Replies are decoded with weights of fewer bits: what the loss must then do, and what cannot be."""
    algorithm, setting = config.algorithm, f'engine.weights = "{config.engine.weights}"'
    if config.engine.weights == "float32":
        return
    if config.run.deterministic:
        yield f"{setting} rounds otherwise for few sequences than for many, against run.deterministic; remove one"
    needs = (("lora.rank", (0,)), ("dtype", ("float32", "auto")), ("fast_path", (True,)), ("device", ("cpu", "auto")))
    for key, usual in needs:
        if (given := attrgetter(key)(config.model)) not in usual:
            yield f"{setting} needs model.{key} = {json.dumps(usual[0])}, got {json.dumps(given)}; change one of them"
    if algorithm.objective != "rl" or algorithm.correction.name != "none":
        return
    differs = f"{setting} samples from another distribution than the learner's, which"
    correct = 'algorithm.correction.name = "tis"'
    if without := ", ".join(losses_without_ratio(algorithm)):
        other = f'use loss "importance_sampling", or set {correct} and proximal = "recompute"'
        yield f"{differs} loss {without} does not correct for; {other}"
    elif algorithm.proximal == "recompute":
        yield f'{differs} nothing corrects for; set {correct}, or algorithm.proximal = "sampler"'


def _cut_distribution(config: RunConfig) -> Iterator[str]:
    """Tokens that cannot be sampled: the learner does not know the cut, so no ratio to the sampler is right."""
    rollout, algorithm = config.rollout, config.algorithm
    cut = {"top_p": rollout.top_p} if rollout.top_p < 1 else {}
    cut |= {"top_k": rollout.top_k} if rollout.top_k else {}
    if not cut or not rolls_out(config):
        return
    given = " and ".join(f"rollout.{name} = {value:g}" for name, value in cut.items())
    off = " and ".join(f"rollout.{name} = {usual}" for name, usual in (("top_p", 1), ("top_k", 0)) if name in cut)
    if problem := cut_problem(algorithm):
        yield f"{given} {problem[0]}; set {off}, or {problem[1]}"


def _values(config: RunConfig) -> Iterator[str]:
    for name, declared in estimator_facts(config.algorithm).items():
        if not declared.needs_value_head:
            continue
        if not has_own({config.backend.name}, "backend") and not facts("backend", config.backend.name).value_head:
            yield (
                f'estimator "{name}" needs a value head, and backend "{config.backend.name}" has none; use another '
                f'estimator (docs/algorithms.md), such as "grpo", or backend "local" or "fsdp"'
            )
        elif not config.algorithm.value_head:
            yield f'estimator "{name}" needs a value head; set algorithm.value_head = true'


def _modes(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantage_mode == "per_step":
        warnings.warn(
            'algorithm.advantage_mode = "per_step" is gone and does what "broadcast" does; to compare step by step '
            'set workflow.grouping = "by_step"',
            DeprecationWarning,
            stacklevel=4,
        )
    yield from ()


def best_metric(trainer: TrainerSection, sets: Collection[str]) -> str | None:
    """What trainer.keep_best goes by, of these evaluation sets; None if it is off."""
    if not trainer.keep_best:
        return None
    return trainer.best_metric or (f"eval/{next(iter(sets))}/pass@1" if len(sets) == 1 else None)


def _keeping(config: RunConfig) -> Iterator[str]:
    trainer, sets = config.trainer, config.eval.sets
    metric = best_metric(trainer, sets)
    if not trainer.keep_best:
        return
    if not sets:
        yield "trainer.keep_best needs evaluations to go by, and there is no set; add a section [eval.sets.NAME]"
        return
    if metric is None:
        names = ", ".join(f'"eval/{name}/pass@1"' for name in sets)
        yield f"trainer.keep_best has {len(sets)} evaluation sets to go by; set trainer.best_metric to one of {names}"
    else:
        yield from _unknown_score(metric, config)
    both = math.lcm(trainer.save_every, config.eval.every)  # 0 if one of them is
    if not both or (both > trainer.steps and trainer.updates_per_batch == 1):
        yield (
            f"trainer.keep_best compares checkpoints that were evaluated, and with trainer.save_every "
            f"{trainer.save_every} and eval.every {config.eval.every} no step before the last is both saved and "
            f"evaluated; set both, one a multiple of the other"
        )


def _unknown_score(metric: str, config: RunConfig) -> Iterator[str]:
    """Of a source within a set the last part alone is known beforehand."""
    for name, section in config.eval.sets.items():
        prefix, score = f"eval/{name}/", metric.rpartition("/")[2]
        if metric.startswith(prefix):
            powers = {2**i for i in range(section.attempts.bit_length()) if 2**i <= section.attempts}
            scores = ["reward", *(f"pass@{k}" for k in sorted({*powers, section.attempts})), f"avg@{section.attempts}"]
            if score not in scores and not config.eval.metrics:  # what those are called is not known beforehand
                yield f'trainer.best_metric is "{metric}"; of this set one can go by {", ".join(scores)}'
            return
    known = ", ".join(f"eval/{name}/…" for name in config.eval.sets)
    yield f'trainer.best_metric is "{metric}", which is of no evaluation set; there are {known}'


def _schedule(config: RunConfig) -> Iterator[str]:
    trainer, produce, bound = config.trainer, config.produce, config.trainer.max_staleness
    if bound and config.algorithm.objective == "dpo" and trainer.staleness in ("mask", "trust"):
        yield (
            f'staleness "{trainer.staleness}" leaves single tokens out, and dpo compares complete responses; '
            f'set trainer.staleness = "wait", "drop" or "count"'
        )
    if bound and (produce.over_sample or 0) > bound:
        yield (
            f"produce.over_sample {produce.over_sample:g} carries groups over to later versions, and "
            f"trainer.max_staleness {bound} does not let so many run ahead; raise it to "
            f"{math.ceil(produce.over_sample or 0)}"
        )
    if produce.capacity is not None and produce.capacity < config.trainer.batch_size:
        yield (
            f"produce.capacity is {produce.capacity}, and a step needs {config.trainer.batch_size} groups at once: "
            f"it would never be made; raise it"
        )
    if produce.reuse > 1:
        yield from _reuse(config)
    if config.alarm.stop_drift < config.alarm.warn_drift:
        yield (
            f"alarm.stop_drift {config.alarm.stop_drift:g} is below alarm.warn_drift {config.alarm.warn_drift:g}, "
            f"which would never be given; raise it"
        )


def _reuse(config: RunConfig) -> Iterator[str]:
    bound = config.trainer.max_staleness
    if bound < config.produce.reuse - 1:
        yield (
            f"produce.reuse {config.produce.reuse} trains groups again that are up to {config.produce.reuse - 1} "
            f"versions old, and trainer.max_staleness is {bound}; raise it"
        )
    without = losses_without_ratio(config.algorithm)
    if config.algorithm.objective != "rl" or without:
        what = f"loss {', '.join(without)}" if without else f"objective {config.algorithm.objective}"
        yield f"produce.reuse needs a loss that corrects for what has changed, and {what} does not; set it to 1"


def _streaming(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.stream:
        return
    if trainer.release_cache:
        yield "trainer.stream learns while the engine generates, trainer.release_cache while it does not; remove one"
    reasons = {
        "trainer.updates_per_batch above 1": trainer.updates_per_batch > 1,
        "filters.min_partial_tasks": config.filters.min_partial_tasks > 0,
        "algorithm.use_precomputed_advantage": config.algorithm.use_precomputed_advantage,
        "an estimator that compares groups with each other": not all(
            declared.one_group or not is_loaded("estimator", name)  # what is not loaded is asked at start-up
            for name, declared in estimator_facts(config.algorithm).items()
        ),
    }
    for reason, given in reasons.items():
        if given and config.algorithm.objective != "dpo":
            yield f"trainer.stream trains groups one by one, which does not go with {reason}; remove trainer.stream"


_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _groups,
    _filters,
    _preferences,
    _supervision,
    _ratios,
    _clipping,
    _warm_up,
    _decay,
    _judging,
    _placing,
    _sampled_otherwise,
    _cut_distribution,
    _values,
    _schedule,
    _streaming,
    _keeping,
    _modes,
    exposed_secrets,
)


# these read what estimators and losses declare, which is known of a user's own once its module is loaded
_BY_FACTS = (_groups, _sampled_otherwise, _cut_distribution, _schedule, _streaming)


def check_declared(config: RunConfig) -> None:
    """Raise ConfigError for contradictions that show when the user's own estimators and losses are loaded."""
    _refuse([problem for rule in _BY_FACTS for problem in rule(config)])


def resolve_objective(config: RunConfig) -> RunConfig:
    """The configuration with the settings that its objective implies."""
    algorithm, rollout = config.algorithm, config.rollout
    objective = facts("objective", algorithm.objective)
    settled = {"estimator": objective.estimator, "loss": objective.loss}
    algorithm = algorithm.model_copy(update={key: name for key, name in settled.items() if name is not None})
    if not rolls_out(config):  # a demonstration, or a pair of a file: one episode per task
        rollout = rollout.model_copy(update={"group_size": 1})
    return config.model_copy(update={"algorithm": algorithm, "rollout": rollout})
