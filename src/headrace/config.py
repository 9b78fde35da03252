"""Every configuration class. Frozen, no unknown keys, one docstring per field (they are the `--help` text)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class RunSection(Section):
    """What the run is called and where it is kept."""

    name: str = "run"
    """Name of the run; its folder is DIR/NAME."""
    dir: Path = Path("runs")
    """Folder that holds runs."""
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


class DataSection(Section):
    """Where training tasks come from."""

    tasks: str = "countdown"
    """A registered source, a .jsonl file, or "module:function" of your own that returns tasks."""
    args: dict[str, Any] = {}
    """Keyword arguments of the source."""
    shuffle: bool = True
    """Shuffle each epoch by (seed, epoch); false keeps the order of the source."""
    drop_last: bool = True
    """Drop the last, short batch of an epoch; false hands it out short."""


class WorkflowSection(Section):
    """What the agent does and how it is judged."""

    name: str = "single_turn"
    """A registered workflow, "module:function" or "file.py:function" of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of a workflow class."""
    judger: str | None = None
    """Who scores episodes whose workflow gave no reward: a registered judger or "module:object"; empty for none."""
    judger_args: dict[str, Any] = {}
    """Keyword arguments of a judger class."""


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


class EngineSection(Section):
    """What generates tokens."""

    name: str = "torch"
    """A registered rollout engine."""
    max_batch: int = Field(default=128, ge=1)
    """Sequences decoded together."""
    max_model_length: int | None = Field(default=None, ge=2)
    """Longest prompt plus response, in tokens; empty takes the model's own limit."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens computed at once."""


class AlgorithmSection(Section):
    """What is optimised."""

    objective: Literal["rl", "sft"] = "rl"
    """"rl" trains on rollouts; "sft" on the assistant turns of the tasks' own messages."""
    estimator: str = "grpo"
    """How rewards become advantages: a registered estimator or "module:function"."""
    normalize_by_std: bool = True
    """grpo: divide by the group's standard deviation; false is Dr. GRPO."""
    loss: str = "ppo_clip"
    """How advantages become a loss: a registered loss or "module:function"."""
    clip_low: float = Field(default=0.2, ge=0)
    """ppo_clip: the ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """ppo_clip: the ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """ppo_clip: bound on the ratio where the advantage is negative; empty for none."""
    proximal: Literal["sampler", "recompute"] = "sampler"
    """Denominator of the ratio: the sampler's log-probabilities, or the learner's own at the start of the batch."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum", "constant"
    ] = "token_mean"
    """How token losses are averaged over the whole optimizer step."""
    aggregation_length: int = Field(default=1024, ge=1)
    """The fixed length that aggregation "constant" divides by."""


class FilterSection(Section):
    """Which groups are not trained."""

    drop_uniform: bool = False
    """Drop groups whose rewards are all equal: their advantages are 0."""


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
    """Tasks (groups) per optimizer step."""
    placement: Literal["colocate"] = "colocate"
    """Where the engine runs: "colocate" shares device and weights with the learner."""
    max_staleness: Literal[0] = 0
    """How many versions old a trained token may be; 0 is on-policy."""
    save_every: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; 0 never (the last step is still saved when save_last is true)."""
    save_last: bool = True
    """Checkpoint after the last step."""
    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept."""


class EvalSet(Section):
    """One evaluation set."""

    tasks: str
    """A registered source, a .jsonl file, or "module:function"."""
    args: dict[str, Any] = {}
    """Keyword arguments of the source."""
    attempts: int = Field(default=1, ge=1)
    """Rollouts of each task; pass@k and avg@k are reported up to this k."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest response; empty takes rollout.max_tokens."""


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


class TrackSection(Section):
    """Where metrics go."""

    trackers: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Registered trackers or "module:class" of your own."""
    plot: bool = True
    """Draw the reward curve into the run folder at the end (needs headrace[plot])."""


class RunConfig(Section):
    """A whole run. Every section has defaults, so a run file names only what differs."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    workflow: WorkflowSection = WorkflowSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    filters: FilterSection = FilterSection()
    optimizer: OptimizerSection = OptimizerSection()
    backend: BackendSection = BackendSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    track: TrackSection = TrackSection()

    @model_validator(mode="after")
    def _combinations_make_sense(self) -> RunConfig:
        if self.algorithm.objective == "rl" and self.algorithm.estimator == "grpo" and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size must be at least 2 for grpo, got {self.rollout.group_size}; "
                f'raise rollout.group_size or use estimator "reinforce"'
            )
        if self.algorithm.objective == "rl" and self.rollout.temperature == 0:
            raise ValueError("rollout.temperature must be above 0 to train, got 0; greedy rollouts do not explore")
        return self
