"""The conditions under which settings have effect; the sections say which of their fields need which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from headrace.config.derived import (
    asks_teacher,
    chosen,
    compares_rewards,
    estimator_facts,
    has_own,
    has_rows,
    is_judged,
    longest_reply,
    on_servers,
    places_engines,
    places_judgers,
    places_learners,
    reads_old,
    reads_rows,
    rolls_out,
    samples_as_learned,
    saves,
    starts_engines,
    trains_own,
    uses_workflow,
    varies,
)
from headrace.config.effect import Condition, Effects, declare
from headrace.registry import builtin, facts

if TYPE_CHECKING:
    pass

Correction = Literal["none", "tis", "icepop", "sequence_mask", "veto"]
CORRECTIONS = get_args(Correction)
_ONE_CALL = {"single_turn", "demonstration", "preference"}
_SEVERAL_CALLS = tuple(builtin("workflow").keys() - _ONE_CALL)
_ONE_ROLE = tuple(builtin("workflow").keys() - {"external_agent"})  # whose program may name roles
_GIVEN_TEXTS = "objective {c.algorithm.objective} trains on given texts, not on rollouts"


RL = Condition(
    lambda s: s.c.algorithm.objective == "rl",
    'objective {c.algorithm.objective} does not read it, only "rl" does',
)
DPO = Condition(
    lambda s: s.c.algorithm.objective == "dpo",
    'it is for algorithm.objective = "dpo", and the objective is "{c.algorithm.objective}"',
    "remove it, or set the objective",
)
NOT_DPO = Condition(lambda s: s.c.algorithm.objective != "dpo", "objective dpo does not read it")
KL_NOT_DPO = Condition(
    lambda s: s.c.algorithm.objective != "dpo", "the beta of objective dpo pulls to the reference", "set dpo.beta"
)
NOT_SFT_TERM = Condition(
    lambda s: s.c.algorithm.objective != "sft",
    "[sft] mixes demonstrations into reinforcement learning, and the objective is sft already",
    "remove it; demonstrations come from [data]",
)
LOSS_OF_OBJECTIVE = Condition(
    lambda s: s.c.algorithm.objective == "rl" or (s.c.algorithm.objective == s.own.loss == "dpo"),
    "objective {c.algorithm.objective} has a loss of its own",
)
USES_WORKFLOW = Condition(
    lambda s: s.c.algorithm.objective != "sft" or bool(s.c.eval.sets),
    "objective sft trains on the tasks' own messages, and there is no evaluation set",
    "remove it, or add a section [eval.sets.NAME]",
)
ROLLS_OUT = Condition(lambda s: rolls_out(s.c), _GIVEN_TEXTS)
SAMPLES = Condition(
    lambda s: rolls_out(s.c) or bool(s.c.eval.sets),
    f"{_GIVEN_TEXTS}, and there is no evaluation set",
    "remove it, or add a section [eval.sets.NAME]",
)
AHEAD = Condition(
    lambda s: s.c.trainer.max_staleness > 0 or varies(s.c, "trainer.max_staleness"),
    "trainer.max_staleness is 0, so nothing is generated ahead of training",
    "remove it, or raise trainer.max_staleness",
)
NOT_TINKER = Condition(
    lambda s: s.c.backend.name != "tinker",
    'backend "tinker" leaves it to the service',
    "remove it, or change backend.name",
)
_DEVICE = 'model.device is "{c.model.device}"'
MAYBE_CPU = Condition(
    lambda s: s.c.model.device in ("auto", "cpu"),
    f"it is for the CPU, and {_DEVICE}",
    "remove it, or change model.device",
)
MAYBE_ACCELERATOR = Condition(
    lambda s: s.c.model.device != "cpu", f"it is for accelerators, and {_DEVICE}", "remove it, or change model.device"
)
MAYBE_CUDA = Condition(
    lambda s: s.c.model.device == "auto" or s.c.model.device.startswith("cuda"),
    f"it is for CUDA, and {_DEVICE}",
    "remove it, or change model.device",
)
MAYBE_WIDE = Condition(
    lambda s: s.c.model.dtype in ("auto", "float32") and not (s.c.model.dtype == "auto" and s.c.model.device == "cpu"),
    'only float32 products are rounded so, and model.dtype is "{c.model.dtype}"',
    'remove it, or set model.dtype = "float32"',
)
BASE_FROZEN = Condition(
    lambda s: s.c.model.lora.rank > 0,
    "model.lora.rank is 0, and quantised weights cannot be trained",
    "remove it, or set model.lora.rank",
)
CHECKPOINTS = Condition(
    lambda s: s.own.gradient_checkpointing,
    "backend.gradient_checkpointing is false",
    "remove it, or set backend.gradient_checkpointing = true",
)
FSDP = Condition(
    lambda s: s.c.backend.name == "fsdp" or has_own({s.c.backend.name}, "backend"),
    'it is for backend "fsdp", and backend.name is "{c.backend.name}"',
)
RANKS = Condition(
    lambda s: s.c.backend.name in ("fsdp", "verl") or has_own({s.c.backend.name}, "backend"),
    'it is for backends with ranks ("fsdp", "verl"), and backend.name is "{c.backend.name}"',
)
VERL = Condition(
    lambda s: s.c.backend.name == "verl" or has_own({s.c.backend.name}, "backend"),
    'it is for backend "verl", and backend.name is "{c.backend.name}"',
)
NOT_VERL = Condition(
    lambda s: s.c.backend.name != "verl",
    'backend "verl" computes with verl\'s own forward pass',
    "remove it, or see docs/verl.md for what [backend.verl] has in its place",
)
TINKER_RANK = Condition(lambda s: s.c.backend.name != "tinker", "the adapters are the service's", "set tinker.rank")
TINKER = Condition(
    lambda s: s.c.backend.name == "tinker" or has_own({s.c.backend.name}, "backend"),
    'it is for backend "tinker", and backend.name is "{c.backend.name}"',
)
ON_SERVERS = Condition(
    lambda s: on_servers(s.c) or has_own({s.c.engine.name}, "engine"),
    'it is for engines on servers ("vllm", "sglang"), and engine.name is "{c.engine.name}"',
    "remove it, or change engine.name",
)
NOT_ON_SERVERS = Condition(
    lambda s: not on_servers(s.c),
    'engine "{c.engine.name}" leaves it to its servers',
    "remove it, or set engine.server_args",
)
SEVERAL_ENGINES = Condition(
    lambda s: s.c.backend.name != "tinker",
    'backend "tinker" samples on the service',
    "remove it, or change backend.name",
)
STARTS_SERVERS = Condition(
    lambda s: not s.own.urls, "engine.urls names servers that run already", "remove one of the two"
)
GIVEN_SERVERS = Condition(
    lambda s: bool(s.own.urls), "Headrace starts the servers, on loopback", "remove it, or set engine.urls"
)
PARTIAL = Condition(
    lambda s: s.c.trainer.partial_rollouts or varies(s.c, "trainer.partial_rollouts"),
    "trainer.partial_rollouts is false, so no sequence is in flight at a weight sync",
    "remove one of the two",
)
NAMED_HERE = Condition(
    lambda s: s.c.backend.name != "tinker" or not s.c.tinker.model,
    'tinker.model = "{c.tinker.model}" says which model the service trains',
    "remove one of the two",
)
TINKER_STATE = Condition(lambda s: bool(s.own.state), "tinker.state is empty", "remove it, or set tinker.state")
TINKER_SEGMENTS = Condition(
    lambda s: s.c.backend.name != "tinker" or s.c.tinker.segment_tokens is not None,
    "one request per reply ends under the weights it began with",
    "remove it, or set tinker.segment_tokens",
)
LORA = Condition(
    lambda s: s.own.rank > 0, "model.lora.rank is 0, so there are no adapters", "remove it, or raise model.lora.rank"
)
FALLS = Condition(
    lambda s: s.own.schedule != "constant",
    'optimizer.schedule is "constant", so the learning rate does not fall',
    'remove it, or set optimizer.schedule to "linear" or "cosine"',
)
NO_WARMUP_STEPS = Condition(
    lambda s: s.own.warmup_steps == 0,
    "optimizer.warmup_steps = {own.warmup_steps} says how long the warm-up is",
    "remove one of the two",
)
SEPARATE = Condition(
    lambda s: s.c.trainer.placement == "separate" or on_servers(s.c) or has_own({s.c.backend.name}, "backend"),
    "a colocated engine shares the learner's threads",
    'set backend.threads, or trainer.placement = "separate"',
)
CACHE_SHARED = Condition(
    lambda s: not s.own.release_cache or s.own.placement == "colocate",
    "a separate engine shares no memory with the learner",
)
SAVES_ON_THE_WAY = Condition(
    lambda s: saves(s.own),
    "trainer.save_every and trainer.save_every_s are 0, so only the last step is saved",
    "remove it, or set one of these",
)
COPIES = Condition(
    lambda s: not s.own.save_async or saves(s.own),
    "trainer.save_every and trainer.save_every_s are 0, and the last step is saved without a copy",
    "remove it, or set one of these",
)
KEEPS_BEST = Condition(lambda s: s.own.keep_best > 0, "trainer.keep_best is 0", "remove it, or set trainer.keep_best")
HAS_SETS = Condition(
    lambda s: bool(s.c.eval.sets), "there is no evaluation set", "remove it, or add a section [eval.sets.NAME]"
)
EVALUATED = Condition(
    # a callback may call trainer.evaluate()
    lambda s: s.c.eval.before or s.c.eval.after or s.c.eval.every > 0 or bool(s.c.trainer.callbacks),
    "eval.before and eval.after are false and eval.every is 0, so the set is never evaluated",
    "remove the set (--eval.sets={{}}), or set one of these",
)
ROWS = Condition(
    lambda s: has_rows(s.own.tasks), '{at}.tasks = "{own.tasks}" generates tasks, which have no other columns'
)
BAD_ROWS = Condition(lambda s: reads_rows(s.c), "all tasks are generated, so there are no bad rows")
SOURCE_NOT_MIXED = Condition(
    lambda s: not s.own.mixture, "data.mixture says where tasks come from", "set it in [data.mixture.NAME]"
)
SEVERAL_SOURCES = Condition(lambda s: len(s.c.data.mixture) > 1, "the mixture has only one source")
CURRICULUM = Condition(
    lambda s: s.own.target is not None,
    "data.curriculum.target is empty, so all tasks are drawn equally often",
    "remove it, or set data.curriculum.target",
)
NO_CURRICULUM = Condition(lambda s: s.own.curriculum.target is None, "the batches of a curriculum are all full")
OWN_TASKS = Condition(
    lambda s: s.own.tasks != "holdout", 'with {at}.tasks = "holdout" the tasks are taken as training has them'
)
WARM = Condition(lambda s: s.own.temperature > 0, "{at}.temperature is 0", "remove it, or raise {at}.temperature")
ATTEMPTS_DIFFER = Condition(
    lambda s: s.own.temperature > 0,
    "{at}.temperature is 0, where all attempts are the same",
    "raise {at}.temperature, or set attempts = 1",
)
OWN_WORKFLOW = Condition(lambda s: s.own.workflow is not None, "{at}.workflow is empty", "set {at}.workflow, too")
OWN_JUDGER = Condition(lambda s: s.own.judger is not None, "{at}.judger is empty", "set {at}.judger, too")
NAMED_JUDGER = Condition(lambda s: bool(s.c.workflow.judger), "workflow.judger is empty", "set workflow.judger, too")
JUDGED = Condition(
    lambda s: is_judged(s.c),
    "there is no judger",
    "remove it, or set workflow.judger or judge.routes",
)
JUDGED_ON_RAY = Condition(
    lambda s: s.own.placement == "ray",
    'judge.placement is "local"',
    'remove it, or set judge.placement = "ray"',
)
PLACES = Condition(
    lambda s: places_learners(s.c) or places_judgers(s.c) or places_engines(s.c),
    'no part of the run is placed on a cluster: backend "{c.backend.name}" runs on this machine, judge.placement is '
    '"local", and cluster.engine is empty',
    'remove it, or set backend.name = "fsdp" or "verl", judge.placement = "ray", or cluster.engine',
)
ON_RAY = Condition(
    lambda s: bool(s.own.address),
    "cluster.address is empty, so there is no cluster",
    'remove it, or set cluster.address to "auto", "local" or an address',
)
RAY_LEARNERS = Condition(
    lambda s: places_learners(s.c), 'backend "{c.backend.name}" runs in the trainer\'s own process'
)
RAY_ENGINES = Condition(
    lambda s: starts_engines(s.c),
    "the engine shares the learner's process or bundle, runs at engine.urls already, or is the service's",
    'remove it, or set trainer.placement = "separate" with an engine that Headrace starts',
)
RAY_JUDGERS = Condition(
    lambda s: places_judgers(s.c), 'judge.placement is "local"', 'remove it, or set judge.placement = "ray"'
)
SEVERAL_TURNS = Condition(
    lambda s: uses_workflow(s.c, *_SEVERAL_CALLS),
    'workflow "{c.workflow.name}" makes one model call per episode',
)
BELOW_ONE_REPLY = Condition(
    lambda s: uses_workflow(s.c, *_SEVERAL_CALLS) or s.own.max_episode_tokens <= longest_reply(s.c),
    'workflow "{c.workflow.name}" makes one model call per episode, of at most rollout.max_tokens = '
    "{own.max_tokens} tokens",
)
COMPARES_STEPS = Condition(
    lambda s: s.own.grouping != "by_step" or s.own.name not in _ONE_CALL,
    'an episode of workflow "{c.workflow.name}" has one step, so its steps are compared anyway',
)
GIVES_ADVANTAGES = Condition(
    lambda s: trains_own(s.c),
    'workflow "{c.workflow.name}" writes no advantages into its steps',
    "remove it, or use a workflow of your own",
)
ENDS_BY_TURNS = Condition(
    lambda s: "turns" not in s.own.drop_terminations or s.c.workflow.name not in _ONE_CALL,
    'workflow "{c.workflow.name}" makes one model call per episode, so none ends with reason "turns"',
    'remove "turns"',
)
ENDS_BY_TOOLS = Condition(
    lambda s: (
        "tools" not in s.own.drop_terminations
        or trains_own(s.c)
        or (s.c.workflow.name == "tool_agent" and s.c.rollout.max_tool_calls is not None)
    ),
    'no episode ends with reason "tools": workflow "{c.workflow.name}" calls no tools, or rollout.max_tool_calls is '
    "empty",
    'remove "tools", or set rollout.max_tool_calls for a workflow with tools',
)
ENDS_BY_TOKENS = Condition(
    lambda s: "tokens" not in s.own.drop_terminations or trains_own(s.c) or s.c.rollout.max_episode_tokens is not None,
    'rollout.max_episode_tokens is empty, so no episode ends with reason "tokens"',
    'remove "tokens", or set rollout.max_episode_tokens',
)
ENDS_BY_TIMEOUT = Condition(
    lambda s: "timeout" not in s.own.drop_terminations or trains_own(s.c),
    'an episode of workflow "{c.workflow.name}" that takes too long has failed, and failed ones are never trained',
    'remove "timeout"',
)
TOOLS = Condition(lambda s: uses_workflow(s.c, "tool_agent"), 'workflow "{c.workflow.name}" calls no tools')
GATEWAY = Condition(lambda s: uses_workflow(s.c, "external_agent"), 'workflow "{c.workflow.name}" opens no gateway')
ROLE_COMES = Condition(
    lambda s: s.c.workflow.name not in _ONE_ROLE or s.at.rpartition(".")[2] == "agent",
    'the trajectories of workflow "{c.workflow.name}" have the role "agent"',
    "remove it, or call the section [algorithm.roles.agent]",
)
ANOTHER_ROLE = Condition(
    lambda s: s.own.train or s.c.workflow.name not in _ONE_ROLE,
    'all trajectories of workflow "{c.workflow.name}" have the role "agent"',
    problem="leaves nothing to train",
)
ROLE_TRAINED = Condition(lambda s: s.own.train, "{at}.train is false", "remove one of the two")
NOT_DETERMINISTIC = Condition(
    lambda s: not s.c.run.deterministic or not s.own.kept_tokens,
    "run.deterministic keeps none",
    "remove it, or unset run.deterministic",
)
TOGETHER = Condition(
    lambda s: not s.c.run.deterministic or not s.own.compile,
    "run.deterministic decodes one sequence at a time, with what is not compiled",
    "remove it, or unset run.deterministic",
)
SAMPLES_AS_LEARNED = Condition(
    lambda s: samples_as_learned(s.c),
    "with rollout.top_p, rollout.top_k, model.lora.dropout or engine.weights changed, sampler and learner differ by "
    "intention, and are not compared",
)
SEVERAL_ROLLOUTS = Condition(
    lambda s: s.c.rollout.group_size > 1,
    "it looks for different rewards in a group, and rollout.group_size is 1",
)
COMPARES_REWARDS = Condition(
    lambda s: compares_rewards(s.c), 'it looks for different rewards, and estimator "distill" compares none'
)
CAN_TIE = Condition(
    lambda s: s.own.min_reward_gap == 0,
    "dpo.min_reward_gap = {own.min_reward_gap:g} skips ties already",
    "remove one of the two",
)
SFT_TERM = Condition(lambda s: s.own.coef > 0, "sft.coef is 0", "remove it, or set sft.coef")
VALUES = Condition(
    lambda s: any(one.needs_value_head for one in estimator_facts(s.c.algorithm).values()),
    'only estimator "gae" reads values',
)
TEACHES = Condition(
    lambda s: asks_teacher(s.c.algorithm) or has_own({s.c.workflow.name}, "workflow"),
    'nobody asks the teacher: neither is estimator "distill" chosen, nor a workflow of your own',
    'set algorithm.estimator = "distill", or use a workflow of your own under self_distill',
)
TEACHER_IS_POLICY = Condition(
    lambda s: s.own.teacher == "initial",
    'it copies the policy into the teacher, and distill.teacher is "{own.teacher}"',
    'remove it, or set distill.teacher = "initial"',
)
READS_OLD = Condition(
    lambda s: s.own.proximal != "recompute" or reads_old(s.c),
    "no chosen loss reads the learner's log-probabilities at the start of the batch, and no correction is on",
)
DIVIDES_BY_LENGTH = Condition(
    lambda s: s.own.aggregation == "constant",
    'it is read by aggregation "constant", not by "{own.aggregation}"',
    "remove it, or set algorithm.aggregation",
)
KL = Condition(lambda s: s.own.coef > 0, "algorithm.kl.coef is 0", "remove it, or set algorithm.kl.coef")
KL_OFF_REWARD = Condition(
    lambda s: s.own.where != "reward" or any(one.reads_rewards for one in estimator_facts(s.c.algorithm).values()),
    "it takes the divergence off rewards, which no chosen estimator reads",
    'set algorithm.kl.where = "loss"',
)
LEDGER = Condition(lambda s: s.own.enabled, "ledger.enabled is false", "remove one of the two")
PRUNES = Condition(
    lambda s: saves(s.c.trainer) or s.c.trainer.save_last,
    "old episodes are removed when a checkpoint is saved, and trainer.save_every, save_every_s and save_last are off",
    "remove it, or set one of these",
)
GIVEN_DURATIONS = Condition(
    lambda s: s.own.from_run is None, "simulate.from_run has measured it", "remove one of the two"
)
GIVEN_SLOTS = Condition(
    lambda s: s.c.simulate.from_run is None,
    "the durations of simulate.from_run were measured on the engines that the run had",
    "remove one of the two",
)
NODES_ARE_LOST = Condition(
    lambda s: s.own.mtbf_h > 0 or varies(s.c, "simulate.fleet.mtbf_h"),
    "simulate.fleet.mtbf_h is 0, so no node is lost",
    "remove it, or set simulate.fleet.mtbf_h",
)
SYNC_COSTS = Condition(
    lambda s: s.own.weights_gb > 0 or varies(s.c, "simulate.fleet.weights_gb"),
    "simulate.fleet.weights_gb is 0, so weight syncs are part of simulate.learn_s",
    "remove it, or set simulate.fleet.weights_gb",
)
SYNC_BY_FILE = Condition(
    lambda s: s.own.transport == "file" or varies(s.c, "simulate.fleet.transport"),
    'simulate.fleet.transport is "{own.transport}"',
    'remove it, or set simulate.fleet.transport = "file"',
)
SLOW_TASKS = Condition(
    lambda s: s.own.slow_share > 0 or varies(s.c, "simulate.slow_share"),
    "simulate.slow_share is 0",
    "remove it, or set simulate.slow_share",
)
DROPS_UNIFORM = Condition(
    lambda s: s.c.filters.drop_uniform or varies(s.c, "filters.drop_uniform"),
    "nothing filters groups",
    "remove it, or set filters.drop_uniform = true",
)
MEASURES_DRIFT = Condition(
    lambda s: s.c.trainer.staleness not in ("count", "drop", "wait", "mask") or varies(s.c, "trainer.staleness"),
    'trainer.staleness = "{c.trainer.staleness}" does not measure how far the policy has moved',
)


def read_by(kind: Literal["estimator", "loss"], *settings: str) -> Effects:
    """Settings of [algorithm] that some estimators or losses read; a user's own may read any."""
    return declare(*(_read_by(kind, setting)(setting) for setting in settings))


def _read_by(kind: Literal["estimator", "loss"], setting: str) -> Condition:
    names = [name for name in builtin(kind) if setting in facts(kind, name).settings]
    return Condition(
        lambda s: has_own(chosen(s.c.algorithm, kind), kind) or bool(chosen(s.c.algorithm, kind) & set(names)),
        f"it is read by {kind} {', '.join(names)}, and none of these is chosen",
    )


def read_by_correction(*settings: str) -> Effects:
    """Settings of [algorithm.correction] that some corrections read."""
    return declare(*(_read_by_correction(setting)(setting) for setting in settings))


def _read_by_correction(setting: str) -> Condition:
    names = [name for name in CORRECTIONS if setting in facts("correction", name).settings]
    return Condition(
        lambda s: s.own.name in names,
        f'it is read by correction {", ".join(names)}, not by "{{own.name}}"',
        "remove it, or set algorithm.correction.name",
    )


_SERVICES = {"wandb", "mlflow", "trackio"}


def _tracked_by(config: Any, some: set[str]) -> bool:
    """Whether one of these trackers is named, or one of the user's own."""
    return any(name in some or name not in builtin("tracker") for name in config.track.trackers)


AT_A_SERVICE = Condition(
    lambda s: _tracked_by(s.c, _SERVICES),
    "track.trackers has neither wandb, mlflow or trackio nor a tracker of your own",
    "remove it, or add one of these",
)
TAKES_MODEL = Condition(
    lambda s: _tracked_by(s.c, {"wandb", "mlflow"}),
    "track.trackers has neither wandb or mlflow nor a tracker of your own",
    "remove it, or add one of these",
)
TAKES_EPISODES = Condition(
    lambda s: _tracked_by(s.c, {*_SERVICES, "tensorboard"}),
    "track.trackers has neither tensorboard, wandb, mlflow or trackio nor a tracker of your own",
    "remove it, or add one of these",
)
LISTS_EPISODES = Condition(lambda s: s.own.episodes > 0, "track.episodes is 0", "remove one of the two")
