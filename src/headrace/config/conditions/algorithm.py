"""When the settings of the algorithm and its filters have effect."""

from __future__ import annotations

from typing import Literal, get_args

from headrace.config.conditions.shared import ONE_CALL
from headrace.config.derived import (
    asks_teacher,
    chosen,
    compares_rewards,
    estimator_facts,
    has_own,
    reads_old,
    trains_own,
)
from headrace.config.effect import Condition, Effects, declare
from headrace.registry import builtin, facts

Correction = Literal["none", "tis", "icepop", "sequence_mask", "veto"]
CORRECTIONS = get_args(Correction)
_ONE_ROLE = tuple(builtin("workflow").keys() - {"external_agent"})  # whose program may name roles
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
GIVES_ADVANTAGES = Condition(
    lambda s: trains_own(s.c),
    'workflow "{c.workflow.name}" writes no advantages into its steps',
    "remove it, or use a workflow of your own",
)
ENDS_BY_TURNS = Condition(
    lambda s: "turns" not in s.own.drop_terminations or s.c.workflow.name not in ONE_CALL,
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
