"""What follows from several settings together: conditions, rules and backends ask it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from headrace.registry import builtin, facts

if TYPE_CHECKING:
    from headrace.algorithms.facts import EstimatorFacts, LossFacts
    from headrace.config import AlgorithmSection, RunConfig, TrainerSection

_GENERATED_TASKS = {*builtin("tasks"), "holdout"}


def chosen(algorithm: AlgorithmSection, kind: str) -> set[str]:
    """Names of the estimators or losses that the run uses, over all roles."""
    own = {getattr(role, kind) for role in algorithm.roles.values()}
    return {getattr(algorithm, kind), *(name for name in own if name)}


def has_own(names: Collection[str], kind: str) -> bool:
    """Whether one is a user's own, which may read anything."""
    return not set(names) <= builtin(kind).keys()


def estimator_facts(algorithm: AlgorithmSection) -> dict[str, EstimatorFacts]:
    """What is declared of the estimators that the run uses, by name."""
    return {name: facts("estimator", name) for name in sorted(chosen(algorithm, "estimator"))}


def loss_facts(algorithm: AlgorithmSection) -> dict[str, LossFacts]:
    """What is declared of the losses that the run uses, by name."""
    return {name: facts("loss", name) for name in sorted(chosen(algorithm, "loss"))}


def losses_without_ratio(algorithm: AlgorithmSection) -> list[str]:
    """The chosen losses that do not correct for tokens of another policy."""
    return [name for name, declared in loss_facts(algorithm).items() if declared.ratio is None]


def cut_problem(algorithm: AlgorithmSection) -> tuple[str, str] | None:
    """What is wrong with training on replies that top_p or top_k cut, and what to do about it."""
    if algorithm.objective != "rl":
        return None
    cuts = "cuts the distribution that is sampled from, and the learner does not know the cut"
    against = [name for name, declared in loss_facts(algorithm).items() if declared.ratio == "sampler"]
    if against:
        return f"{cuts}: the ratio of loss {', '.join(against)} would be wrong", "use another loss"
    if algorithm.correction.name != "none":
        return f"{cuts}: correction {algorithm.correction.name} would be wrong", "remove the correction"
    if algorithm.proximal == "sampler" and not losses_without_ratio(algorithm):
        wrong = f'{cuts}: with algorithm.proximal = "sampler" no ratio would be 1'
        return wrong, 'set algorithm.proximal = "recompute"'
    return None


def group_by_group(algorithm: AlgorithmSection) -> bool:
    """Whether no estimator of the run compares groups with each other: they can be trained one by one."""
    return all(one.one_group for one in estimator_facts(algorithm).values())


def asks_teacher(algorithm: AlgorithmSection) -> bool:
    """Whether an estimator of the run needs the teacher."""
    return any(one.needs_teacher for one in estimator_facts(algorithm).values())


def reads_pairs(config: RunConfig) -> bool:
    """Whether preference pairs come from a file: each task is then one episode with two replies."""
    return config.algorithm.objective == "dpo" and config.workflow.name == "preference"


def rolls_out(config: RunConfig) -> bool:
    """Whether what is trained is sampled by the run itself."""
    return config.algorithm.objective != "sft" and not reads_pairs(config)


def uses_workflow(config: RunConfig, *names: str) -> bool:
    """Whether a workflow that is used, in training or evaluation, is one of these or a user's own."""
    used = {config.workflow.name, *(one.workflow for one in config.eval.sets.values() if one.workflow)}
    return has_own(used, "workflow") or bool(used & set(names))


def trains_own(config: RunConfig) -> bool:
    """Whether the workflow that is trained is a user's own, which may do anything."""
    return has_own({config.workflow.name}, "workflow")


def has_rows(tasks: str) -> bool:
    """Whether a source has rows that somebody wrote: a file, a dataset or a user's own function."""
    return tasks not in _GENERATED_TASKS and not tasks.startswith("reasoning_gym:")


def reads_rows(config: RunConfig) -> bool:
    data = config.data
    training = [one.tasks for one in data.mixture.values()] or [data.tasks]
    return any(has_rows(tasks) for tasks in (*training, *(one.tasks for one in config.eval.sets.values())))


def longest_reply(config: RunConfig) -> int:
    return max(config.rollout.max_tokens, *(one.max_tokens or 0 for one in config.eval.sets.values()), 0)


def saves(trainer: TrainerSection) -> bool:
    """Whether checkpoints are written before the last step."""
    return trainer.save_every > 0 or trainer.save_every_s > 0


def varies(config: RunConfig, key: str) -> bool:
    return key in config.simulate.grid


def reads_old(config: RunConfig) -> bool:
    losses = loss_facts(config.algorithm)
    reads = has_own(losses, "loss") or any(one.ratio == "old" for one in losses.values())
    return reads or config.algorithm.correction.name != "none"


def compares_rewards(config: RunConfig) -> bool:
    algorithm = config.algorithm
    return algorithm.objective == "dpo" or not all(one.needs_teacher for one in estimator_facts(algorithm).values())


def samples_as_learned(config: RunConfig) -> bool:
    """Whether the sampler's distribution is meant to be the learner's."""
    rollout, model = config.rollout, config.model
    return rollout.top_p == 1 and not rollout.top_k and not model.lora.dropout and config.engine.weights == "float32"


def on_servers(config: RunConfig) -> bool:
    """Whether servers sample, which Headrace talks to over HTTP."""
    return config.engine.name in ("vllm", "sglang")


def starts_beside(config: RunConfig) -> bool:
    """Whether Headrace starts servers that share the learner's device."""
    return on_servers(config) and not config.engine.urls and config.trainer.placement == "colocate"


def is_judged(config: RunConfig) -> bool:
    """Whether there is a judger."""
    return bool(config.workflow.judger or config.judge.routes or any(one.judger for one in config.eval.sets.values()))


def places_learners(config: RunConfig) -> bool:
    """Whether the learner can be placed on a cluster: it has ranks, or is a user's own."""
    return config.backend.name in ("fsdp", "verl") or has_own({config.backend.name}, "backend")


def places_judgers(config: RunConfig) -> bool:
    """Whether judgers are placed on a cluster."""
    return config.judge.placement == "ray"


def places_engines(config: RunConfig) -> bool:
    """Whether engine replicas have bundles of their own on a cluster."""
    return bool(config.cluster.address and config.cluster.engine)


def shares_bundles(config: RunConfig) -> bool:
    """Whether servers are started in the bundles of the learner's ranks."""
    ranked = config.backend.name == "fsdp" and bool(config.cluster.address)
    return ranked and on_servers(config) and not config.engine.urls and config.trainer.placement == "colocate"


def starts_engines(config: RunConfig) -> bool:
    """Whether there are engines that Headrace starts, apart from the learner."""
    own = has_own({config.engine.name}, "engine")
    started = config.trainer.placement == "separate" and not config.engine.urls and config.backend.name != "tinker"
    return own or started


def uses_ray(config: RunConfig) -> bool:
    """Whether the run has parts that are placed on a Ray cluster."""
    parts = (places_learners(config), places_judgers(config), places_engines(config))
    return bool(config.cluster.address) and any(parts)


def sampler_kind(config: RunConfig) -> tuple[str, str]:
    """Engine and type of its weights, as metrics call them: what sampler and learner differ by depends on both."""
    section = config.engine
    args = section.server_args
    served = args[args.index("--dtype") + 1] if "--dtype" in args[:-1] else config.model.dtype
    dtype = section.weights if section.weights != "float32" else served
    return section.name.replace(":", ".").replace("/", "."), dtype
