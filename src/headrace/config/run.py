"""The model, its optimizer and backend, the run folder, trackers and ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

import headrace.config.conditions.run as when
from headrace.config.base import LONGEST_S, MOST_STEPS, MOST_TOKENS, Section
from headrace.config.conditions import shared
from headrace.config.effect import always, declare

_LONGEST_NAME = 200  # of 255 on most file systems: "-2" and other endings are added


class RunSection(Section):
    """What the run is called and where it is kept."""

    name: str = "run"
    """Name of the run; its folder is DIR/NAME."""
    dir: Path = Path("runs")
    """Folder that holds runs."""
    resume: str = "auto"
    """"auto" resumes an unfinished run in the folder. "never" starts a new run, NAME-2. The path of a checkpoint, or of
    another run's folder, starts a new run from there."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Seeds task order, sampling and initialisation."""
    deterministic: bool = False
    """Make two runs of the same file equal bit for bit, at some cost in speed. Each sequence is computed in blocks of
    fixed shape, so that the result does not depend on the rest of the batch, with a fixed number of threads
    (backend.threads)."""
    grace_s: float | None = Field(default=None, ge=0, le=LONGEST_S)
    """After Ctrl-C or SIGTERM, how long the current step may still wait for rollouts. Then it is given up, the step
    before is saved, and the run exits; its finished rollouts stay recorded. Empty: wait for the step."""

    effects: ClassVar = always("name", "dir", "resume", "seed", "deterministic", "grace_s")

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str) -> str:
        if name in ("", ".", "..") or set(name) & set("/\\\0\n\r"):
            raise ValueError(f"must be the name of one folder, got {name!r}; folders above it go into run.dir")
        if len(name.encode(errors="surrogatepass")) > _LONGEST_NAME:
            raise ValueError(f"is longer than the {_LONGEST_NAME} bytes that a folder's name may have; shorten it")
        return name

    @field_validator("dir")
    @classmethod
    def _is_a_path(cls, path: Path) -> Path:
        if "\0" in str(path):
            raise ValueError(f"must be a path, got {str(path)!r}")
        return path


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(default=0, ge=0, le=65_536)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Scale of the adapters; the update is alpha / rank times B A."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input, in training only. Above 0, sampler and learner differ."""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Names of the linear layers that get an adapter."""

    effects: ClassVar = declare(
        when.TINKER_RANK("rank", "alpha", "dropout", "targets"), when.LORA("alpha", "dropout", "targets")
    )


class ModelSection(Section):
    """Which model is trained."""

    name: str = "bundled"
    """A name from `headrace model list`, a folder in Hugging Face format, or a hub id."""
    device: str = Field(default="auto", pattern=r"^[a-z]+(:\d{1,3})?$")
    """Where the model computes: "cpu", "cuda", "cuda:1", "mps", "xpu". "auto": the first accelerator, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the weights while training and sampling. "auto": bfloat16 on accelerators, float32 on the CPU."""
    tf32: bool = False
    """Let NVIDIA GPUs round the inputs of float32 products to TF32: faster, with about three decimal digits."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn", "padded"] = "auto"
    """How packed rows attend in transformers: "sdpa" in bins of similar length, "varlen" and "flash_attn" end to end
    (CUDA), "padded" as a right-padded batch. "auto" takes the fastest that is right for the model."""
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Hold the frozen base model of adapters in so few bits (QLoRA; needs the package bitsandbytes)."""
    lora: LoraSection = LoraSection()
    """Adapters; leave rank at 0 to train all weights."""
    fast_path: bool = True
    """Use Headrace's own forward pass for models of the Llama family on the CPU; false always uses that of
    transformers."""

    @field_validator("device")
    @classmethod
    def _one_cpu(cls, device: str) -> str:
        if device.startswith("cpu:"):
            raise ValueError(f'has a number, and there is one CPU; write "cpu" instead of "{device}"')
        return device

    effects: ClassVar = declare(
        when.NAMED_HERE("name"),
        shared.NOT_TINKER("device", "dtype", "attention", "fast_path", "tf32", "quantize"),
        when.NOT_VERL("attention", "tf32", "quantize"),
        when.MAYBE_CPU("fast_path"),
        when.MAYBE_CUDA("tf32"),
        when.MAYBE_WIDE("tf32"),
        when.BASE_FROZEN("quantize"),
    )


class BackendSection(Section):
    """What computes gradients and updates the model."""

    name: str = "local"
    """A registered backend."""
    micro_batch_tokens: int = Field(default=3072, ge=1, le=MOST_TOKENS)
    """Tokens packed into one forward and backward pass. A token in a prefix that a row shares with the row before it
    counts a quarter."""
    logits_chunk: int = Field(default=2048, ge=1, le=MOST_TOKENS)
    """Positions whose logits are held in memory at once."""
    share_prefixes: bool = True
    """Prefix sharing: compute a prefix that rows share (a group's prompt, the turns of a conversation) only once."""
    routing_replay: bool = False
    """Mixture-of-experts models: the learner routes each token to the experts that the engine sampled it with (R3); its
    own router gives their weights. The engine's servers return them; prefixes are not shared."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    checkpoint_every: int = Field(default=1, ge=1, le=1000)
    """With gradient_checkpointing: recompute only every so manieth layer, and keep the activations of the others."""
    threads: int = Field(default=0, ge=0, le=4096)
    """Threads of the tensor library. 0 lets it choose; with run.deterministic, whose results depend on the number, 0
    means 2."""

    ranks: Annotated[int, Field(ge=1, le=65_536)] | Literal["auto"] = "auto"
    """Ranks of backends "fsdp" and "verl". "auto": one for each GPU of this machine, or of the cluster; without GPUs,
    one."""
    shard: int = Field(default=0, ge=0, le=65_536)
    """So many ranks hold the model between them; several such groups hold it several times over (HSDP). 0: all."""
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that split the matrices of each layer between them, by transformers' plan for the model. They are among
    those that hold the model (shard), and have the same rows."""
    context_parallel: int = Field(default=1, ge=1, le=1024)
    """Ranks that split each row between them. More than 1 is refused: torch's ring attention does not know packs of
    rows."""
    cpu_offload: bool = False
    """Keep shards of parameters, gradients and optimizer state in host memory, and on the GPU only while they are
    needed."""
    rank_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """How long ranks may compute without any progress. Then their stacks go to the log, and all are started again."""
    verl: dict[str, dict[str, Any]] = {}
    """Settings of verl's own for backend "verl", checked against its configuration classes: tables "engine", "model"
    and "optimizer"."""

    effects: ClassVar = declare(
        always("name", "micro_batch_tokens"),
        shared.NOT_TINKER("logits_chunk", "share_prefixes", "gradient_checkpointing", "checkpoint_every", "threads"),
        shared.NOT_TINKER("routing_replay"),
        when.CHECKPOINTS("checkpoint_every"),
        when.NOT_VERL("logits_chunk", "share_prefixes", "checkpoint_every", "routing_replay"),
        shared.ROLLS_OUT("routing_replay"),
        shared.ON_SERVERS("routing_replay"),
        when.ROUTES_BY_ITSELF("share_prefixes"),
        when.RANKS("ranks", "shard", "rank_timeout_s"),
        when.FSDP("cpu_offload", "tensor_parallel", "context_parallel"),
        when.VERL("verl"),
    )


Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]  # strict: true is no number


class OptimizerSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-5, gt=0, le=100)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator of the update, for numerical stability."""
    weight_decay: float = Field(default=0.0, ge=0, le=1000)
    """Decoupled weight decay, on matrices only."""
    grad_clip: float = Field(default=1.0, ge=0, le=1e9)
    """Largest norm of the gradient; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps over which the learning rate rises from 0."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all steps; used if warmup_steps is 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of a linear or cosine schedule, as a share of the peak."""
    master_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of what the optimizer updates, and of its moments. Where it is wider than model.dtype, the optimizer has a
    copy of the parameters of its own. "auto": float32 on accelerators, model.dtype on the CPU."""
    offload: bool = False
    """Keep the optimizer's state in host memory, and on the device only while it makes a step."""

    effects: ClassVar = declare(
        shared.NOT_TINKER("master_dtype", "offload"),
        when.NOT_VERL("master_dtype", "offload"),
        when.MAYBE_ACCELERATOR("offload"),
        always("lr", "betas", "eps", "weight_decay", "grad_clip", "schedule", "warmup_steps"),
        when.NO_WARMUP_STEPS("warmup_ratio"),
        when.FALLS("min_lr_ratio"),
    )


class TrackSection(Section):
    """Where metrics go."""

    trackers: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    """Registered trackers or "module:class" of your own."""
    plot: bool = True
    """Draw the reward curve into the run folder at the end (needs the extra plot)."""

    project: str = "headrace"
    """The project (wandb, trackio) or experiment (mlflow) that the run is put in."""
    episodes: int = Field(default=8, ge=0, le=1000)
    """How many episodes of each step trackers get, as a table; 0: none."""
    viewer: str = ""
    """URL at which people reach `headrace view`, such as http://host:8123: rows of that table link to the episode."""
    upload_model: bool = False
    """Give trackers the final model, as a folder in Hugging Face format."""

    effects: ClassVar = declare(
        always("trackers", "plot"),
        when.AT_A_SERVICE("project"),
        when.TAKES_MODEL("upload_model"),
        when.TAKES_EPISODES("episodes", "viewer"),
        shared.ROLLS_OUT("episodes", "viewer"),
        when.LISTS_EPISODES("viewer"),
    )


class LedgerSection(Section):
    """The durable record of the run, ledger.sqlite in its folder."""

    enabled: bool = True
    """Record every dispatched task, model call, episode, decision and training batch, so that a killed run can be
    resumed without losing any."""
    keep_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Keep the messages and tokens of episodes for so many steps after they were trained or dropped; of older episodes
    keep only the numbers. 0 keeps everything."""

    effects: ClassVar = declare(always("enabled"), when.LEDGER("keep_steps"), when.PRUNES("keep_steps"))
