"""Combinations of settings that make no sense: each is an error before anything starts, with the remedy."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter

from headrace.config import AlgorithmSection, DistillSection, DpoSection, RunConfig, Section, SftSection
from headrace.errors import ConfigError
from headrace.registry import builtin

# estimators that do not compare groups with each other; a user's own may, so it sees the whole batch
ONE_GROUP = {"grpo", "rloo", "reinforce", "maxrl", "pkpo", "opo", "gae", "distill", "constant"}
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
_BOUNDED = ("tis", "icepop", "sequence_mask")
_CORRECTION_KNOBS = {"level": ("tis",), "low": _BOUNDED, "high": _BOUNDED, "floor": ("veto",)}
_READ_OLD_LOGPROBS = {"ppo_clip", "gspo", "cispo"}
_WITHOUT_RATIO = {"reinforce", "cross_entropy", "dpo"}
_READ_NO_REWARD = {"distill", "constant"}


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


def _has_own(names: set[str], kind: str) -> bool:
    """Whether one is a user's own, which may read anything."""
    return not names <= builtin(kind).keys()


def _reads_pairs(config: RunConfig) -> bool:
    """Whether preference pairs come from a file: each task is then one episode with two replies."""
    return config.algorithm.objective == "dpo" and config.workflow.name == "preference"


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
    if algorithm.objective != "sft" and not _reads_pairs(config) and config.rollout.temperature == 0:
        yield "rollout.temperature must be above 0 to train, got 0; greedy rollouts are all the same"


def _filters(config: RunConfig) -> Iterator[str]:
    filters, algorithm, size = config.filters, config.algorithm, config.rollout.group_size
    why = ""
    if algorithm.objective == "sft":
        size, why = 1, "objective sft trains one demonstration per task"
    elif _reads_pairs(config):
        size, why = 2, "a given pair is never uniform"
    elif size == 1:
        why = "rollout.group_size is 1"
    elif algorithm.objective == "rl" and chosen(algorithm, "estimator") == {"distill"}:
        why = 'estimator "distill" compares no rewards'
    for key in ("drop_uniform", "min_partial_tasks"):
        if why and _changed(filters, key):
            yield f"filters.{key} looks for different rewards in a group, and {why}; remove it"
    if algorithm.objective == "sft" and filters.drop_terminations:
        yield "filters.drop_terminations does nothing with objective sft, whose demonstrations are whole; remove it"
    if filters.min_trajectories > size:
        remedy = "lower it" if size != config.rollout.group_size else "lower it or raise rollout.group_size"
        yield (
            f"filters.min_trajectories is {filters.min_trajectories}, and a group has {size}: all would be dropped; "
            f"{remedy}"
        )


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
    for key in ("estimator", "loss", "roles", "value_head", "entropy_coef", "aggregation", "proximal", *_KNOBS):
        if _changed(algorithm, key) and not (key == "loss" and algorithm.loss == "dpo"):
            yield f"algorithm.{key} does nothing with objective dpo; remove it"
    if config.sft != SftSection():
        yield "the section [sft] does nothing with objective dpo; remove it"
    if algorithm.use_precomputed_advantage:
        yield "algorithm.use_precomputed_advantage does nothing with objective dpo, which uses no advantages; remove it"
    if algorithm.correction.name != "none":
        yield f'algorithm.correction "{algorithm.correction.name}" does nothing with objective dpo; remove it'
    if algorithm.kl.coef:
        yield "algorithm.kl does nothing with objective dpo, whose beta pulls to the reference; set dpo.beta instead"


_NOT_SUPERVISED = (
    "estimator", "loss", "correction", "kl", "roles", "value_head", "use_precomputed_advantage", "proximal", *_KNOBS
)  # fmt: skip


def _supervision(config: RunConfig) -> Iterator[str]:
    if config.algorithm.objective == "dpo":
        return
    if config.algorithm.objective == "sft":
        for key in _NOT_SUPERVISED:
            if _changed(config.algorithm, key):
                yield f"algorithm.{key} does nothing with objective sft; remove it"
        if config.sft != SftSection():
            yield "the section [sft] mixes demonstrations into reinforcement learning; with objective sft use [data]"
    elif config.sft.coef and config.trainer.updates_per_batch > 1:
        yield "sft.coef goes with one update per batch, got trainer.updates_per_batch above 1; set it to 1"
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
    for key, readers in _CORRECTION_KNOBS.items():
        if _changed(correction, key) and correction.name not in readers:
            yield (
                f"algorithm.correction.{key} is read by correction {', '.join(readers)}, not by "
                f'"{correction.name}"; remove it or set algorithm.correction.name'
            )
    if correction.name in _BOUNDED and correction.low >= correction.high:
        yield f"correction.low {correction.low:g} must be below correction.high {correction.high:g}"
    losses = chosen(algorithm, "loss")
    reads_old = _has_own(losses, "loss") or bool(losses & _READ_OLD_LOGPROBS) or correction.name != "none"
    if algorithm.objective == "rl" and algorithm.proximal == "recompute" and not reads_old:
        yield (
            f'algorithm.proximal = "recompute" costs a forward pass whose result loss {", ".join(sorted(losses))} does '
            f"not read, and no correction is on; remove it"
        )


def _sampled_otherwise(config: RunConfig) -> Iterator[str]:
    """Replies are decoded with weights of fewer bits: what the loss must then do, and what cannot be."""
    algorithm, setting = config.algorithm, f'engine.weights = "{config.engine.weights}"'
    if config.engine.weights == "float32":
        return
    if config.run.deterministic:
        yield f"{setting} rounds otherwise for few sequences than for many, against run.deterministic; remove one"
    for key, usual in (("lora.rank", 0), ("dtype", "float32"), ("fast_path", True)):
        if (given := attrgetter(key)(config.model)) != usual:
            yield f"{setting} needs model.{key} = {json.dumps(usual)}, got {json.dumps(given)}; change one of them"
    if algorithm.objective != "rl" or algorithm.correction.name != "none":
        return
    differs = f"{setting} samples from another distribution than the learner's, which"
    correct = 'algorithm.correction.name = "tis"'
    if without := ", ".join(sorted(chosen(algorithm, "loss") & _WITHOUT_RATIO)):
        other = f'use loss "importance_sampling", or set {correct} and proximal = "recompute"'
        yield f"{differs} loss {without} does not correct for; {other}"
    elif algorithm.proximal == "recompute":
        yield f'{differs} nothing corrects for; set {correct}, or algorithm.proximal = "sampler"'


def _sums(config: RunConfig) -> Iterator[str]:
    """What is added to a loss, or taken off a reward, and what the sum is divided by."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    if _changed(algorithm, "aggregation_length") and algorithm.aggregation != "constant":
        yield (
            f'algorithm.aggregation_length is read by aggregation "constant", not by "{algorithm.aggregation}"; '
            f"remove it or set algorithm.aggregation"
        )
    for key in ("kind", "where"):
        if not kl.coef and _changed(kl, key):
            yield f"algorithm.kl.{key} does nothing while algorithm.kl.coef is 0; set it or remove the section"
    estimators = chosen(algorithm, "estimator")
    if algorithm.objective == "rl" and kl.coef and kl.where == "reward" and estimators <= _READ_NO_REWARD:
        yield (
            f'algorithm.kl.where = "reward" takes the divergence off rewards, which estimator '
            f'{", ".join(sorted(estimators))} does not read; set algorithm.kl.where = "loss"'
        )


def _values(config: RunConfig) -> Iterator[str]:
    wanted = "gae" in chosen(config.algorithm, "estimator")
    if wanted and not config.algorithm.value_head:
        yield 'estimator "gae" needs a value head; set algorithm.value_head = true'
    if config.algorithm.value_head and not wanted:
        yield 'algorithm.value_head does nothing without estimator "gae"; remove it'


def _teaching(config: RunConfig) -> Iterator[str]:
    distilled = "distill" in chosen(config.algorithm, "estimator")
    built_in = config.workflow.name in builtin("workflow")  # a user's own may be under self_distill
    if config.distill != DistillSection() and config.algorithm.objective != "rl":
        yield f"the section [distill] does nothing with objective {config.algorithm.objective}; remove it"
    elif config.distill != DistillSection() and built_in and not distilled:
        yield (
            'the section [distill] does nothing: set algorithm.estimator = "distill" (also where the workflow is given '
            "as an object), or use a workflow of your own under self_distill"
        )
    if config.distill.refresh_every and config.distill.teacher != "initial":
        yield 'distill.refresh_every copies the policy into the teacher, which needs distill.teacher = "initial"'


def _knobs(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.objective != "rl":
        return
    for knob, (kind, readers) in _KNOBS.items():
        names = chosen(algorithm, kind)
        if _changed(algorithm, knob) and not _has_own(names, kind) and not names & set(readers):
            used = ", ".join(sorted(names))
            yield f"algorithm.{knob} is read by {kind} {', '.join(readers)}, not by {used}; remove it"


def _evaluation(config: RunConfig) -> Iterator[str]:
    for name, section in config.eval.sets.items():
        if section.attempts > 1 and section.temperature == 0:
            yield (
                f"eval.sets.{name}.attempts is {section.attempts} at temperature 0, where all attempts are the same; "
                f"raise eval.sets.{name}.temperature or set attempts = 1"
            )


def _modes(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantage_mode == "per_step":
        warnings.warn(
            'algorithm.advantage_mode = "per_step" is gone and does what "broadcast" does; to compare step by step '
            'set workflow.grouping = "by_step"',
            DeprecationWarning,
            stacklevel=4,
        )
    yield from ()


def best_metric(config: RunConfig) -> str | None:
    """What trainer.keep_best goes by; None if it is off."""
    trainer, sets = config.trainer, list(config.eval.sets)
    if not trainer.keep_best:
        return None
    return trainer.best_metric or (f"eval/{sets[0]}/pass@1" if len(sets) == 1 else None)


def _keeping(config: RunConfig) -> Iterator[str]:
    trainer, sets, metric = config.trainer, config.eval.sets, best_metric(config)
    if not trainer.keep_best:
        if trainer.best_metric is not None:
            yield "trainer.best_metric does nothing while trainer.keep_best is 0; set it or remove both"
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
    if bound and (config.algorithm.objective == "sft" or _reads_pairs(config)):
        yield f"trainer.max_staleness is {bound}, but the run samples nothing that could be stale; set it to 0"
    elif bound and config.algorithm.objective == "dpo" and trainer.staleness in ("mask", "trust"):
        yield (
            f'staleness "{trainer.staleness}" leaves single tokens out, and dpo compares whole responses; '
            f'set trainer.staleness = "wait", "drop" or "count"'
        )
    if (produce.over_sample or 0) > bound:
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
    bound, losses = config.trainer.max_staleness, chosen(config.algorithm, "loss")
    if bound < config.produce.reuse - 1:
        yield (
            f"produce.reuse {config.produce.reuse} trains groups again that are up to {config.produce.reuse - 1} "
            f"versions old, and trainer.max_staleness is {bound}; raise it"
        )
    without = sorted(losses & _WITHOUT_RATIO)
    if config.algorithm.objective != "rl" or without:
        what = f"loss {', '.join(without)}" if without else f"objective {config.algorithm.objective}"
        yield f"produce.reuse needs a loss that corrects for what has changed, and {what} does not; set it to 1"


def _streaming(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.release_cache and trainer.placement == "separate":
        yield "trainer.release_cache does nothing with a separate engine, which shares no memory; remove it"
    if not trainer.stream:
        return
    if trainer.release_cache:
        yield "trainer.stream learns while the engine generates, trainer.release_cache while it does not; remove one"
    reasons = {
        "trainer.updates_per_batch above 1": trainer.updates_per_batch > 1,
        "filters.min_partial_tasks": config.filters.min_partial_tasks > 0,
        "algorithm.use_precomputed_advantage": config.algorithm.use_precomputed_advantage,
        "an estimator that compares groups with each other": not chosen(config.algorithm, "estimator") <= ONE_GROUP,
    }
    for reason, given in reasons.items():
        if given and config.algorithm.objective != "dpo":
            yield f"trainer.stream trains groups one by one, which does not go with {reason}; remove trainer.stream"


def _tinker(config: RunConfig) -> Iterator[str]:
    if config.backend.name in builtin("backend") and config.backend.name != "tinker":
        for key in type(config.tinker).model_fields:
            if _changed(config.tinker, key):
                yield f'tinker.{key} is for backend "tinker", and backend.name is "{config.backend.name}"; remove it'


_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _groups,
    _filters,
    _preferences,
    _supervision,
    _ratios,
    _sampled_otherwise,
    _sums,
    _values,
    _teaching,
    _knobs,
    _evaluation,
    _schedule,
    _streaming,
    _keeping,
    _modes,
    _tinker,
)
