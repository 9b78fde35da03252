"""Every configuration class. Frozen, no unknown keys, one docstring per field (they are the `--help` text)."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of every section of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class RunSection(Section):
    """What the run is called and where it is kept."""

    name: str = "run"
    """Name of the run; its folder is DIR/NAME."""
    dir: Path = Path("runs")
    """Folder that holds runs."""
    resume: str = "auto"
    """What is done about earlier work. "auto" goes on with an unfinished run in the folder; "never" leaves it alone and
    starts NAME-2; a checkpoint, or the folder of another run, is where a new run starts from."""
    seed: int = 0
    """Seeds task order, sampling and initialisation."""
    deterministic: bool = False
    """Make two runs of the same file equal to the bit: each sequence is computed in products of fixed shape, so that
    it does not depend on what else happens to be in the batch. Costs some speed."""


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters; the update is alpha / rank times B A."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input, while training only. Anything but 0 makes sampler and learner differ."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""


class ModelSection(Section):
    """Which model is trained."""

    name: str = "bundled"
    """A name from `headrace model list`, a folder in Hugging Face format, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights while training and sampling."""
    lora: LoraSection = LoraSection()
    """Adapters; leave rank at 0 to train all weights."""
    fast_path: bool = True
    """Use Headrace's own forward for the Llama family; false always uses the transformers forward."""


_TASK_FIELDS = ("id", "messages", "instruction", "answer", "source", "metadata")


class SourceSection(Section):
    """Tasks from one place, and how its rows become tasks."""

    tasks: str
    """A registered source, a .jsonl or .parquet file, a folder of a saved Hugging Face dataset, "hf:NAME",
    "reasoning_gym:FAMILY", or "module:function" of your own that returns tasks."""
    args: dict[str, Any] = {}
    """Keyword arguments of the source."""
    columns: dict[str, str] = {}
    """Which column each field of a task is taken from, such as { instruction = "question" }; dots lead into a column. A
    field that is not named here is taken from the column of its own name."""
    template: str | None = None
    """The instruction, made of columns: "{question}\\nAnswer:"."""
    keep_columns: bool = False
    """Put the columns that are no fields of a task into its metadata."""
    system: str | None = None
    """System prompt put before tasks that have none; empty takes data.system."""

    @field_validator("columns")
    @classmethod
    def _are_fields(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(columns) - set(_TASK_FIELDS))
        if unknown:
            raise ValueError(f"a task has no field {', '.join(unknown)}; its fields are {', '.join(_TASK_FIELDS)}")
        return columns

    @model_validator(mode="after")
    def _one_instruction(self) -> Self:
        clash = [name for name in ("instruction", "messages") if name in self.columns]
        if self.template is not None and clash:
            raise ValueError(f"template and columns.{clash[0]} both say what the model is asked; remove one")
        return self


class MixtureSection(SourceSection):
    """One source of a mixture."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the tasks drawn, relative to the other sources' weights."""


class CurriculumSection(Section):
    """Draws tasks more often whose success rate is near a target."""

    target: float | None = Field(default=None, ge=0, le=1)
    """The success rate that is sought; empty draws all tasks alike."""
    by: str = "task"
    """Whose success rate: each "task", each "source", or all tasks with the same "metadata.NAME"."""
    least: float = Field(default=0.1, gt=0, le=1)
    """How often the tasks furthest from the target are drawn, as a share of how often those at the target are."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """How much of the running rate is kept when a group is finished; 0 takes the newest group alone."""


class DataSection(SourceSection):
    """Where training tasks come from."""

    tasks: str = "countdown"
    """A registered source, a .jsonl or .parquet file, a folder of a saved Hugging Face dataset, "hf:NAME",
    "reasoning_gym:FAMILY", or "module:function" of your own that returns tasks."""
    system: str | None = None
    """System prompt put before tasks that have none, in evaluation too."""
    mixture: dict[str, MixtureSection] = {}
    """Several sources by name, drawn by weight, in place of data.tasks."""
    curriculum: CurriculumSection = CurriculumSection()
    """Draw tasks more often whose success rate is near a target."""
    holdout: int | float = Field(default=0, ge=0)
    """Tasks that are not trained, as a share (0.1) or a number (200), for an evaluation set with tasks = "holdout". The
    split is by what is asked: the same question never stands on both sides."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What is done about rows that are no tasks, of evaluation sets too: "skip" leaves them out and says how many."""
    on_overlap: Literal["warn", "stop", "ignore"] = "warn"
    """What is done if an evaluation set asks what is also trained."""
    shuffle: bool = True
    """Shuffle each epoch by (seed, epoch); false keeps the order of the source."""
    drop_last: bool = True
    """Drop the last, short batch of an epoch; false hands it out short or, above max_staleness 0, fills it up from the
    next epoch."""

    @field_validator("holdout")
    @classmethod
    def _is_share_or_number(cls, holdout: int | float) -> int | float:
        if isinstance(holdout, float) and holdout >= 1:
            raise ValueError(f"a share is below 1 (0.1), a number of tasks has no point (200), got {holdout}")
        return holdout

    @model_validator(mode="after")
    def _no_idle_settings(self) -> Self:
        """What does nothing is refused."""
        for name in ("tasks", "args", "columns", "template", "keep_columns"):
            if self.mixture and getattr(self, name) != DataSection.model_fields[name].default:
                raise ValueError(f"{name} does nothing beside a mixture; set it in [data.mixture.NAME]")
        if self.curriculum.target is not None and not self.drop_last:
            raise ValueError("drop_last = false does nothing with a curriculum, whose batches are all full; remove it")
        return self


class WorkflowSection(Section):
    """What the agent does and how it is judged."""

    name: str = "single_turn"
    """A registered workflow, "module:function" or "file.py:function" of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of a workflow class."""
    grouping: str | None = None
    """Which trajectories are compared: "by_step", or "module:function" of (episodes of one task) that returns
    TrajectoryGroups; empty compares those of the same role."""
    judger: str | None = None
    """Who scores episodes whose workflow gave no reward: a registered judger or "module:object"; empty for none."""
    judger_args: dict[str, Any] = {}
    """Keyword arguments of a judger class."""


class JudgeSection(Section):
    """Who judges which task, and what becomes of a judger's failure."""

    routes: dict[str, dict[str, Any]] = {}
    """Source of the task to its judger, {name = ..., args = {...}}; "*" for every other source. Instead of
    workflow.judger."""
    concurrency: int = Field(default=64, ge=1)
    """Episodes judged at once."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest duration of judging one episode, waiting for a free place not counted."""
    retries: int = Field(default=2, ge=0)
    """How often judging is tried again if infrastructure failed: a connection, a time-out, a sandbox."""
    on_failure: Literal["fail_episode", "stop"] = "fail_episode"
    """What a judger's failure does: the episode fails (it does not count as wrong), or the run ends."""


class RolloutSection(Section):
    """How tasks are rolled out."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts of each task, compared with each other."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; the learner scales its logits the same way."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens; 0 for all."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens, of one model call that sets no limit of its own."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the tokenizer's end-of-sequence token always does."""
    max_concurrent: int = Field(default=256, ge=1)
    """Episodes in flight at once."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest duration of one episode; over it, the episode fails with reason "timeout"."""
    max_turns: int | None = Field(default=None, ge=1)
    """Most model calls of one episode; one more ends it with reason "turns". Empty for no limit."""
    max_episode_tokens: int | None = Field(default=None, ge=1)
    """Most tokens sampled in one episode, over all its calls; then it ends with reason "tokens". Empty for no limit."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Most tool calls of one episode; one more ends it with reason "tools". Empty for no limit."""
    retries: int = Field(default=2, ge=0)
    """How often an episode is started again if infrastructure failed (a connection, a server, a sandbox). Failures of
    your own code are not tried again."""


class EngineSection(Section):
    """What generates tokens."""

    name: str = "torch"
    """A registered rollout engine; backend "local" samples with "torch"."""
    max_batch: int = Field(default=128, ge=1)
    """Sequences decoded together."""
    max_model_length: int | None = Field(default=None, ge=2)
    """Longest prompt plus response, in tokens; empty takes the model's own limit."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens computed at once."""
    health_every_s: float = Field(default=2.0, gt=0)
    """Seconds between two looks at the engine's health."""
    cache_on_publish: Literal["keep", "recompute"] = "keep"
    """What new weights do to the keys and values of sequences in flight: those of the old weights are kept, or all are
    computed again."""
    threads: int = Field(default=0, ge=0)
    """Threads of a separate engine; 0 takes half the cores, and leaves the others to the learner."""


class RoleSection(Section):
    """What is different for the trajectories of one role."""

    estimator: str | None = None
    """Estimator of this role; empty takes algorithm.estimator."""
    loss: str | None = None
    """Loss of this role; empty takes algorithm.loss."""
    train: bool = True
    """Whether this role's tokens are trained at all."""


class CorrectionSection(Section):
    """Corrects for the difference between the sampler and the learner's own policy at the start of the batch."""

    name: Literal["none", "tis", "icepop", "sequence_mask", "veto"] = "none"
    """tis clamps the weight, icepop zeroes it outside the bounds, sequence_mask drops sequences whose mean weight is
    outside, veto drops sequences with a token below the floor. All need algorithm.proximal = "recompute"."""
    level: Literal["token", "sequence"] = "token"
    """tis: weigh each token, or each sequence by the product over its tokens."""
    low: float = Field(default=0.0, ge=0)
    """Smallest weight."""
    high: float = Field(default=2.0, gt=0)
    """Largest weight."""
    floor: float = Field(default=1e-4, gt=0)
    """veto: a sequence with a token whose weight is below this is not trained."""


class KlSection(Section):
    """Keeps the policy near a frozen reference, which is loaded only if this is used."""

    coef: float = Field(default=0.0, ge=0)
    """Strength; 0 turns it off."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimate of the divergence. With d = log policy - log reference: k1 d, k2 d²/2, k3 exp(-d) - 1 + d, abs |d|."""
    where: Literal["loss", "reward"] = "loss"
    """Add it to the loss of each token, or take its sum off the trajectory's reward."""


class AlgorithmSection(Section):
    """What is optimised."""

    objective: Literal["rl", "sft", "dpo"] = "rl"
    """"rl" trains on rollouts by advantages; "dpo" on pairs of better and worse rollouts (or of a file); "sft" on the
    assistant turns of the tasks' own messages."""
    estimator: str = "grpo"
    """How rewards become advantages: a name from `headrace algorithms` or "module:function"."""
    normalize_by_std: bool = True
    """grpo: divide by the group's standard deviation; false is Dr. GRPO."""
    pass_k: int = Field(default=2, ge=1)
    """pkpo: the k of the pass@k that is optimised."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """gae: discount of future rewards."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """gae: weight of longer returns."""
    value_head: bool = False
    """gae: train a value head on the model's hidden states."""
    value_coef: float = Field(default=0.5, ge=0)
    """gae: weight of the value loss."""
    use_precomputed_advantage: bool = False
    """Use the advantages that a workflow wrote into its Steps; groups without any fall back to the estimator."""
    loss: str = "ppo_clip"
    """How advantages become a loss: a name from `headrace algorithms` or "module:function"."""
    clip_low: float = Field(default=0.2, ge=0)
    """ppo_clip, gspo, cispo: the ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """ppo_clip, gspo, cispo: the ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """ppo_clip, gspo: bound on the ratio where the advantage is negative; empty for none."""
    dppo_delta: float = Field(default=0.2, gt=0)
    """dppo_tv, dppo_kl: a token that has moved further than this, and is to move on, is dropped."""
    proximal: Literal["sampler", "recompute"] = "sampler"
    """Denominator of the ratio: the sampler's log-probabilities, or the learner's own at the start of the batch."""
    entropy_coef: float = 0.0
    """Entropy bonus: this times the entropy is taken off the loss of each token."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum", "constant"
    ] = "token_mean"
    """How token losses are averaged over the whole optimizer step."""
    aggregation_length: int = Field(default=1024, ge=1)
    """The fixed length that aggregation "constant" divides by."""
    correction: CorrectionSection = CorrectionSection()
    """Correction for the difference between sampler and learner."""
    kl: KlSection = KlSection()
    """Divergence from a reference."""
    roles: dict[str, RoleSection] = {}
    """What is different for single roles, by name."""
    advantage_mode: Literal["broadcast", "per_step"] = "broadcast"
    """"per_step" is gone: it warns and does what "broadcast" does; set workflow.grouping = "by_step" instead."""

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
    refresh_every: int = Field(default=0, ge=0)
    """Copy the policy into the teacher every so many versions; 0 keeps the teacher fixed."""
    coef: float = Field(default=1.0, gt=0)
    """Advantage of a token: this times (log teacher - log student)."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """Add the discounted advantages of the tokens that follow; 0 for none."""
    clip: float | None = Field(default=None, gt=0)
    """Largest size of an advantage; empty for none."""


class DpoSection(Section):
    """Preference pairs, for objective "dpo"."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference."""
    min_reward_gap: float = Field(default=0.0, ge=0)
    """Pairs whose rewards differ by less are skipped."""
    drop_ties: bool = True
    """Skip groups whose best and worst rewards are equal; false trains the first against the last of them."""


class SftSection(Section):
    """A supervised term beside reinforcement learning."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the mean cross-entropy of the demonstrations; 0 turns it off."""
    tasks: str = ""
    """Where the demonstrations come from: a registered source, a .jsonl file or "module:function"; tasks whose messages
    have assistant turns."""
    args: dict[str, Any] = {}
    """Keyword arguments of the source."""
    batch_size: int = Field(default=16, ge=1)
    """Demonstrations per optimizer step."""


class FilterSection(Section):
    """Which groups are not trained."""

    drop_uniform: bool = False
    """Drop groups whose rewards are all equal (their advantages are 0), and roll out others until the batch is full."""
    min_trajectories: int = Field(default=1, ge=1)
    """Drop groups in which fewer trajectories are left (after failures and dropped terminations)."""
    drop_terminations: tuple[Literal["length", "turns", "tokens", "tools", "timeout"], ...] = ()
    """Episodes that ended for one of these reasons without failing are not trained; failed ones never are."""
    min_partial_tasks: int = Field(default=0, ge=0)
    """Rejection sampling: add batches to the step until so many of its tasks are solved by some rollouts and not by
    others; 0 turns it off."""
    most_replacements: int = Field(default=100, ge=1)
    """How many groups (or added batches) in a row may come to nothing before the run ends with the reason."""


class OptimizerSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all steps; used where warmup_steps is 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak at which linear and cosine end."""


class BackendSection(Section):
    """What trains."""

    name: str = "local"
    """A registered backend."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens packed into one forward and backward pass."""
    logits_chunk: int = Field(default=1024, ge=1)
    """Positions whose logits are in memory at once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    threads: int = Field(default=0, ge=0)
    """Threads of the tensor library; 0 leaves its own choice."""


class TrainerSection(Section):
    """The loop."""

    steps: int = Field(default=100, ge=0)
    """Optimizer steps."""
    batch_size: int = Field(default=16, ge=1)
    """Tasks (groups) per batch."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on each batch, each on an equal share of its rows. Above 1 all but the first are off-policy, and
    the losses' ratios and clips come into play."""
    placement: Literal["colocate", "separate"] = "colocate"
    """Where the engine runs: "colocate" shares device and weights with the learner; "separate" is a process of its own
    that receives weights."""
    max_staleness: int = Field(default=0, ge=0)
    """How many versions generation may run ahead of training; 0 is on-policy. What happens to work that has grown older
    is up to trainer.staleness."""
    staleness: str = "trust"
    """What is done about work older than max_staleness: "count" (nothing), "drop", "wait", "mask", "trust" (train what
    has not diverged), or "module:class"."""
    partial_rollouts: bool = True
    """Sequences in flight when new weights come carry on under them; false lets all of them finish first."""
    stream: bool | None = None
    """Start learning on the first whole groups of a step while the others are still generated. Empty: where the engine
    is separate."""
    release_cache: bool | None = None
    """colocate: free the engine's cache while learning. Sequences in flight wait, and are computed again afterwards.
    Empty: where none can be in flight (max_staleness 0)."""
    save_every: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; 0 never (the last step is still saved when save_last is true)."""
    save_last: bool = True
    """Checkpoint after the last step."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    keep_best: int = Field(default=0, ge=0)
    """Checkpoints kept beside those: the ones whose evaluation was best by best_metric."""
    best_metric: str | None = None
    """What keep_best goes by, such as "eval/NAME/pass@1"; the higher the better. Empty: pass@1 of the only set."""
    save_async: bool | None = None
    """Copy the state, which takes memory, and write the copy while training goes on. Empty: where the backend can."""
    callbacks: tuple[str, ...] = ()
    """"module:class" of your own Callbacks, told of every step, publication and evaluation."""


class ProduceSection(Section):
    """How rollouts are started and handed to the learner."""

    over_sample: float | None = Field(default=None, ge=0)
    """Groups started beyond those that a step needs, as a share of them: the first whole ones are trained, the others
    carry on. Empty: as many as trainer.max_staleness allows."""
    order: Literal["fifo", "oldest_version", "newest"] = "fifo"
    """Which whole groups are trained first: those that became whole first, those with the oldest tokens, or those that
    became whole last."""
    capacity: int | None = Field(default=None, ge=1)
    """Most groups that run or wait to be trained at once. Empty: twice what max_staleness lets run ahead."""
    reuse: int = Field(default=1, ge=1)
    """Train each group up to so many times; losses with a ratio correct for what has changed since."""
    spill_above_mb: float = Field(default=1024.0, gt=0)
    """Whole groups that wait to be trained are kept on disk beyond so much memory."""


class AlarmSection(Section):
    """What happens when the learner's log-probabilities differ from those that the same version sampled with."""

    warn_drift: float = Field(default=0.02, gt=0)
    """Mean absolute difference above which a warning is given."""
    stop_drift: float = Field(default=0.5, gt=0)
    """Mean absolute difference above which the run ends: the engine does not have the weights it should have."""


class EvalSet(SourceSection):
    """One evaluation set."""

    tasks: str
    """The same as data.tasks, or "holdout": what data.holdout keeps from training (args = { count = N } takes N)."""
    attempts: int = Field(default=1, ge=1)
    """Rollouts of each task; pass@k and avg@k are reported up to this k."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest response; empty takes rollout.max_tokens."""
    limit: int | None = Field(default=None, ge=1)
    """Take only the first so many tasks; empty takes all."""
    workflow: str | None = None
    """A workflow of its own; empty takes the run's."""
    workflow_args: dict[str, Any] = {}
    """Keyword arguments of its own workflow."""
    judger: str | None = None
    """A judger of its own; empty takes the run's."""
    judger_args: dict[str, Any] = {}
    """Keyword arguments of its own judger."""

    @model_validator(mode="after")
    def _no_idle_settings(self) -> Self:
        """What does nothing is refused."""
        for name in ("workflow", "judger"):
            if getattr(self, f"{name}_args") and getattr(self, name) is None:
                raise ValueError(f"{name}_args are those of a {name} of the set's own; set {name} too")
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(f"top_p = {self.top_p:g} does nothing at temperature 0; raise temperature or remove top_p")
        return self


class EvalSection(Section):
    """When and on what the policy is evaluated."""

    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps; 0 only before and after."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    sets: dict[str, EvalSet] = {}
    """Evaluation sets by name."""
    metrics: tuple[str, ...] = ()
    """"module:function" of your own: gets the episodes of a set, a list per task, and returns {name: number}."""


class TrackSection(Section):
    """Where metrics go."""

    trackers: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Registered trackers or "module:class" of your own."""
    plot: bool = True
    """Draw the reward curve into the run folder at the end (needs headrace[plot])."""


class LedgerSection(Section):
    """The durable record of the run, ledger.sqlite in its folder."""

    enabled: bool = True
    """Record every dispatched task, model call, episode, decision and training batch, so that a killed run goes on
    where it was."""
    keep_steps: int = Field(default=0, ge=0)
    """Keep what was said in episodes that were trained, or thrown away, up to so many steps ago; of older ones only the
    figures. 0 keeps everything."""


class DriftSection(Section):
    """How far a simulated policy moves. A token's log-probability changes by a normal number whose standard deviation
    is the task's factor times sigma times age to the power `power`."""

    sigma: float = Field(default=0.05, ge=0)
    """Standard deviation of the change of a token's log-probability after one version."""
    power: float = Field(default=0.5, ge=0, le=1)
    """How it grows with age: 0.5 is a random walk, 1 a steady drift."""
    spread: float = Field(default=0.5, ge=0)
    """The policy moves more on some tasks than on others: a task's factor is lognormal, with this standard deviation of
    its logarithm."""
    noise: float = Field(default=0.0, ge=0)
    """Standard deviation of what sampler and learner differ by at the same version, from rounding."""


class SimulateSection(Section):
    """What `headrace simulate` assumes, and which settings it compares."""

    from_run: Path | None = None
    """Folder of a run whose durations (and shares of failed and filtered work) are taken; empty takes those below."""
    group_s: float = Field(default=10.0, gt=0)
    """Median seconds from the start of a group until it is whole."""
    group_spread: float = Field(default=0.3, ge=0)
    """How they vary: standard deviation of their logarithm."""
    slow_share: float = Field(default=0.0, ge=0, le=1)
    """Share of tasks that are slow."""
    slow_factor: float = Field(default=10.0, ge=1)
    """How many times longer slow tasks take."""
    learn_s: float = Field(default=5.0, gt=0)
    """Seconds of one training step, with the publication of its weights."""
    failed_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of episodes that fail."""
    filtered_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of groups with uniform rewards, which filters.drop_uniform drops."""
    tokens: int = Field(default=32, ge=1)
    """Tokens of a simulated episode."""
    token_place: float = Field(default=0.5, ge=0, le=1)
    """Where in the duration of a group its tokens are sampled, on average: 0.5 spreads them evenly over it; less means
    that it waits (for tools, for a judge) after them, more that it waits before."""
    slow_token_place: float | None = Field(default=None, ge=0, le=1)
    """The same for slow tasks; empty takes token_place."""
    steps: int = Field(default=500, ge=1)
    """Training steps that are simulated."""
    warmup: int | None = Field(default=None, ge=0)
    """First steps that do not count in the figures; empty for a quarter of them."""
    grid: dict[str, tuple[Any, ...]] = {}
    """Settings to compare: a key of the run file and its values. Every combination is simulated."""
    drift: DriftSection = DriftSection()
    """How far the policy moves, for policies that measure it."""

    @field_validator("grid", mode="before")
    @classmethod
    def _flatten(cls, grid: Any) -> Any:
        """`trainer.max_staleness = [...]` without quotes is a table in a table to TOML; it means the same here."""
        return dict(flatten(grid)) if isinstance(grid, dict) else grid


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, under their keys joined by dots."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class GatewaySection(Section):
    """The HTTP server through which programs outside reach the model."""

    host: str = "127.0.0.1"
    """Address that it listens at. One that others can reach needs a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port that it listens at; 0 takes a free one."""
    token: str | None = None
    """What clients must send as API key; "$NAME" takes it from the environment, so that it is not written to disk."""
    public_host: str | None = None
    """Name under which programs elsewhere reach this machine; empty for host."""
    max_body_mb: float = Field(default=32.0, gt=0)
    """Largest request, in MB."""
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Seconds between signs of life to a client that waits for a streamed reply."""
    unsupported: Literal["refuse", "warn"] = "refuse"
    """What is done about fields of a request that cannot be honoured: the request is refused, or it is answered
    without them, with one warning for each."""

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> Self:
        if not self.token and not _is_loopback(self.host):
            raise ValueError(
                f'host "{self.host}" can be reached from other machines, and there is no token; '
                'set gateway.token, or leave gateway.host at "127.0.0.1"'
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RunConfig(Section):
    """A whole run. Every section has defaults, so a run file names only what differs."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    workflow: WorkflowSection = WorkflowSection()
    judge: JudgeSection = JudgeSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    dpo: DpoSection = DpoSection()
    distill: DistillSection = DistillSection()
    sft: SftSection = SftSection()
    filters: FilterSection = FilterSection()
    optimizer: OptimizerSection = OptimizerSection()
    backend: BackendSection = BackendSection()
    trainer: TrainerSection = TrainerSection()
    produce: ProduceSection = ProduceSection()
    alarm: AlarmSection = AlarmSection()
    eval: EvalSection = EvalSection()
    track: TrackSection = TrackSection()
    ledger: LedgerSection = LedgerSection()
    simulate: SimulateSection = SimulateSection()
    gateway: GatewaySection = GatewaySection()

    @property
    def fresh_groups(self) -> int:
        """Groups of a step that were not trained before; the others are trained again (produce.reuse)."""
        return -(-self.trainer.batch_size // self.produce.reuse)
