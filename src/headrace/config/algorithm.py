"""What is optimised."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

import headrace.config.conditions.algorithm as when
from headrace.config.base import MOST_STEPS, MOST_TOKENS, Section
from headrace.config.conditions import shared
from headrace.config.effect import always, declare


class RoleSection(Section):
    """What is different for the trajectories of one role."""

    estimator: str | None = None
    """Estimator of this role; empty takes algorithm.estimator."""
    loss: str | None = None
    """Loss of this role; empty takes algorithm.loss."""
    train: bool = True
    """Whether this role's tokens are trained at all."""

    effects: ClassVar = declare(
        when.RL("estimator", "loss", "train"),
        when.ROLE_COMES("estimator", "loss", "train"),
        when.ANOTHER_ROLE("train"),
        when.ROLE_TRAINED("estimator", "loss"),
    )


class CorrectionSection(Section):
    """Corrects for the difference between the sampler and the learner's own policy at the start of the batch."""

    name: when.Correction = "none"
    """tis clamps the weight, icepop zeroes it outside the bounds, sequence_mask drops sequences whose mean weight is
    outside, veto drops sequences with a token below the floor. All need algorithm.proximal = "recompute"."""
    level: Literal["token", "sequence"] = "token"
    """tis: weigh each token, or each sequence by the product over its tokens."""
    low: float = Field(default=0.0, ge=0, le=1e6)
    """Smallest weight."""
    high: float = Field(default=2.0, gt=0, le=1e6)
    """Largest weight."""
    floor: float = Field(default=1e-4, gt=0, le=1)
    """veto: a sequence with a token whose weight is below this is not trained."""

    effects: ClassVar = declare(
        when.RL("name", "level", "low", "high", "floor"),
        when.read_by_correction("level", "low", "high", "floor"),
    )


class KlSection(Section):
    """Keeps the policy near a frozen reference, which is loaded only if this is used."""

    coef: float = Field(default=0.0, ge=0, le=1e6)
    """Strength; 0 turns it off."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate of the divergence. With d = log policy - log reference: k1 d, k2 d²/2, k3 exp(-d) - 1 + d, abs |d|."""
    where: Literal["loss", "reward"] = "loss"
    """Add it to the loss of each token, or take its sum off the trajectory's reward."""

    effects: ClassVar = declare(
        when.KL_NOT_DPO("coef", "kind", "where"),
        when.RL("coef", "kind", "where"),
        when.KL("kind", "where"),
        when.KL_OFF_REWARD("where"),
    )


class AlgorithmSection(Section):
    """What is optimised."""

    objective: Literal["rl", "sft", "dpo"] = "rl"
    """"rl" trains on rollouts by advantages; "dpo" on pairs of better and worse rollouts (or of a file); "sft" on the
    assistant turns of the tasks' own messages."""
    estimator: str = "grpo"
    """How rewards become advantages: a name from `headrace algorithms` or "module:function"."""
    normalize_by_std: bool = True
    """grpo: divide by the group's standard deviation; false is Dr. GRPO."""
    pass_k: int = Field(default=2, ge=1, le=4096)
    """pkpo: the k of the pass@k that is optimised."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """gae: discount of future rewards."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """gae: weight of longer returns."""
    value_head: bool = False
    """gae: train a value head on the model's hidden states."""
    value_coef: float = Field(default=0.5, ge=0, le=1e6)
    """gae: weight of the value loss."""
    use_precomputed_advantage: bool = False
    """Use the advantages that a workflow wrote into its Steps; groups without any fall back to the estimator."""
    loss: str = "ppo_clip"
    """How advantages become a loss: a name from `headrace algorithms` or "module:function"."""
    clip_low: float = Field(default=0.2, ge=0, le=1e6)
    """ppo_clip, gspo, cispo: the ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0, le=1e6)
    """ppo_clip, gspo, cispo: the ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e6)
    """ppo_clip, gspo: bound on the ratio where the advantage is negative; empty for none."""
    dppo_delta: float = Field(default=0.2, gt=0, le=1e6)
    """dppo_tv, dppo_kl: a token that has moved further than this is dropped if its update would move it further."""
    proximal: Literal["sampler", "recompute"] = "sampler"
    """Denominator of the ratio: the sampler's log-probabilities, or the learner's own at the start of the batch."""
    entropy_coef: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Entropy bonus: this times the entropy is taken off the loss of each token."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum", "constant"
    ] = "token_mean"
    """How token losses are averaged over the optimizer step."""
    aggregation_length: int = Field(default=1024, ge=1, le=MOST_TOKENS)
    """The fixed length that aggregation "constant" divides by."""
    correction: CorrectionSection = CorrectionSection()
    """Correction for the difference between sampler and learner."""
    kl: KlSection = KlSection()
    """Divergence from a reference."""
    roles: dict[str, RoleSection] = {}
    """What is different for single roles, by name."""
    advantage_mode: Literal["broadcast", "per_step"] = "broadcast"
    """"per_step" is deprecated: it warns and acts as "broadcast"; set workflow.grouping = "by_step" instead."""

    effects: ClassVar = declare(
        always("objective", "advantage_mode"),
        when.LOSS_OF_OBJECTIVE("loss"),
        when.RL("estimator", "use_precomputed_advantage", "value_head", "proximal", "pass_k", "normalize_by_std"),
        when.RL("gamma", "gae_lambda", "value_coef", "clip_low", "clip_high", "dual_clip", "dppo_delta"),
        when.NOT_DPO("entropy_coef", "aggregation", "aggregation_length"),
        when.GIVES_ADVANTAGES("use_precomputed_advantage"),
        when.DIVIDES_BY_LENGTH("aggregation_length"),
        when.READS_OLD("proximal"),
        when.VALUES("value_head"),
        when.read_by("estimator", "normalize_by_std", "pass_k", "gamma", "gae_lambda", "value_coef"),
        when.read_by("loss", "clip_low", "clip_high", "dual_clip", "dppo_delta"),
    )

    def trains(self, role: str) -> bool:
        """Whether the role is trained at all."""
        return role not in self.roles or self.roles[role].train

    def for_role(self, role: str) -> AlgorithmSection:
        """These settings with the role's own laid over them."""
        own = self.roles.get(role)
        if own is None:
            return self
        changes = {"estimator": own.estimator or self.estimator, "loss": own.loss or self.loss}
        return self.model_copy(update=changes)


class DistillSection(Section):
    """The teacher, for estimator "distill" and for workflows under `self_distill`."""

    teacher: str = "initial"
    """"initial" is the policy as the run began; or another model, whose tokenizer may differ."""
    refresh_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Copy the policy into the teacher every so many versions; 0 keeps the teacher fixed."""
    coef: float = Field(default=1.0, gt=0, le=1e6)
    """Advantage of a token: this times (log teacher - log student)."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """Add the discounted advantages of the tokens that follow; 0 for none."""
    clip: float | None = Field(default=None, gt=0, le=1e6)
    """Largest size of an advantage; empty for none."""

    effects: ClassVar = declare(
        when.RL("teacher", "refresh_every", "coef", "discount", "clip"),
        when.TEACHES("teacher", "refresh_every", "coef", "discount", "clip"),
        when.TEACHER_IS_POLICY("refresh_every"),
    )


class DpoSection(Section):
    """Preference pairs, for objective "dpo"."""

    beta: float = Field(default=0.1, gt=0, le=1e6)
    """Strength of the pull to the reference."""
    min_reward_gap: float = Field(default=0.0, ge=0, le=1e9)
    """Pairs whose rewards differ by less are skipped."""
    drop_ties: bool = True
    """Skip groups whose best and worst rewards are equal; false trains the first against the last of them."""

    effects: ClassVar = declare(
        when.DPO("beta", "min_reward_gap", "drop_ties"), shared.ROLLS_OUT("drop_ties"), when.CAN_TIE("drop_ties")
    )


class SftSection(Section):
    """A supervised term beside reinforcement learning."""

    coef: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the mean cross-entropy of the demonstrations; 0 turns it off."""
    tasks: str = ""
    """Where the demonstrations come from: a registered source, a .jsonl file or "module:function"; tasks whose messages
    have assistant turns."""
    args: dict[str, Any] = {}
    """Keyword arguments of the source."""
    batch_size: int = Field(default=16, ge=1, le=65_536)
    """Demonstrations per optimizer step."""

    effects: ClassVar = declare(
        when.NOT_SFT_TERM("coef", "tasks", "args", "batch_size"),
        when.RL("coef", "tasks", "args", "batch_size"),
        when.SFT_TERM("tasks", "args", "batch_size"),
    )


class FilterSection(Section):
    """Which groups are not trained."""

    drop_uniform: bool = False
    """Drop groups whose rewards are all equal (their advantages are 0), and roll out others until the batch is full."""
    min_trajectories: int = Field(default=1, ge=1, le=4096)
    """Drop groups with fewer trajectories, after failures and dropped terminations."""
    drop_terminations: tuple[Literal["length", "turns", "tokens", "tools", "timeout"], ...] = ()
    """Do not train episodes that ended for one of these reasons. Failed episodes are never trained."""
    min_partial_tasks: int = Field(default=0, ge=0, le=65_536)
    """Rejection sampling: add batches to the step until so many of its tasks are solved by some rollouts and not by
    others; 0 turns it off."""
    most_replacements: int = Field(default=100, ge=1, le=1_000_000)
    """How many groups (or added batches) in a row may be dropped before the run ends with the reason."""

    effects: ClassVar = declare(
        always("min_trajectories", "most_replacements"),
        shared.ROLLS_OUT("drop_uniform", "min_partial_tasks", "drop_terminations"),
        when.ENDS_BY_TURNS("drop_terminations"),
        when.ENDS_BY_TOOLS("drop_terminations"),
        when.ENDS_BY_TOKENS("drop_terminations"),
        when.ENDS_BY_TIMEOUT("drop_terminations"),
        when.SEVERAL_ROLLOUTS("drop_uniform", "min_partial_tasks"),
        when.COMPARES_REWARDS("drop_uniform", "min_partial_tasks"),
    )
