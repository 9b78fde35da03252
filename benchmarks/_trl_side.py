"""TRL's side of vs_trl.py, which starts this file in TRL's own environment. Nothing of Headrace is imported here."""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _trl_vllm import send_by_file

NO_TOKEN = -1


@dataclass(frozen=True)
class Work:
    """What both sides do: `steps` updates, each on the next `prompts_per_step` prompts."""

    model: str
    """A folder in Hugging Face format."""
    prompts: list[str]
    prompt_ids: list[list[int]]
    """What the texts are to either side's tokenizer: both check."""
    steps: int
    prompts_per_step: int = 4
    group_size: int = 8
    new_tokens: int = 64
    learning_rate: float = 1e-6
    threads: int = 2
    seed: int = 0
    gradient_checkpointing: bool = False
    fast_path: bool = True
    """Whether Headrace's side uses its own forward pass, or that of transformers as TRL does."""
    vllm_python: str | None = None
    """The interpreter of an environment with vLLM, if Headrace's side samples with a vLLM server."""
    vllm_url: str | None = None
    """The vLLM server that TRL's side samples with, if it does."""
    vllm_packages: str | None = None
    """Where TRL's side then finds vLLM's package, which its client imports."""

    @property
    def rows(self) -> int:
        """Completions of one step."""
        return self.prompts_per_step * self.group_size


@dataclass
class Measurements:
    """What one process came to; the lists have an entry per step."""

    step_s: list[float] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)
    """Everything that is not training: sampling and scoring."""
    generated_tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


def distinct_share(ids: Sequence[int]) -> float:
    """The reward on both sides: cheap, and rarely equal within a group."""
    return len(set(ids)) / len(ids)


def peak_mb() -> float:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """`distinct_share` as TRL calls it."""
    return [distinct_share(ids) for ids in completion_ids]


def settings(work: Work, scratch: Path) -> Any:
    """The same algorithm as Headrace's side, without logging and saving."""
    from trl import GRPOConfig

    no_end = {"eos_token_id": NO_TOKEN}
    by_server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": work.vllm_url}
    return GRPOConfig(
        output_dir=str(scratch),
        max_steps=work.steps,
        per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=work.group_size,
        max_completion_length=work.new_tokens,
        generation_kwargs={"ignore_eos": True} if work.vllm_url else no_end,
        **(by_server if work.vllm_url else {}),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=work.gradient_checkpointing,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=work.seed,
    )


def measured(trainer: Any, work: Work, measurements: Measurements) -> None:
    """Time the trainer's steps, and in them what comes before training; check that no token is missing."""
    from transformers import TrainerCallback

    generate = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        began = time.perf_counter()
        batch = generate(inputs)
        measurements.generate_s.append(time.perf_counter() - began)
        mask = batch["completion_mask"]
        if tuple(mask.shape) != (work.rows, work.new_tokens) or not bool(mask.all()):
            raise SystemExit(f"TRL was to train {work.rows} x {work.new_tokens} tokens, and has {mask.sum(1).tolist()}")
        if not bool(batch["advantages"].any()):
            raise SystemExit("all of TRL's advantages are 0, so that it has nothing to learn")
        measurements.generated_tokens.append(int(mask.sum()))
        if "importance_sampling_ratio" in batch:  # near 1 if the server samples with the learner's weights
            apart = float((batch["importance_sampling_ratio"] - 1).abs().max())
            measurements.notes.setdefault("ratio_apart_from_1", []).append(apart)
        measurements.rewards.append(sum(reward(batch["completion_ids"].tolist())) / work.rows)
        return batch

    class Clock(TrainerCallback):
        """A step lasts from the end of the one before, so that nothing is left out between two."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            measurements.step_s.append(now - self.began)
            self.began = now

    trainer._generate_and_score_completions = timed
    trainer.add_callback(Clock())


def train(work: Work, scratch: Path) -> Measurements:
    """Train with GRPOTrainer."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(work.threads)
    sender = send_by_file() if work.vllm_url else None
    trainer = trl.GRPOTrainer(
        model=work.model,
        reward_funcs=reward,
        args=settings(work, scratch),
        train_dataset=Dataset.from_dict({"prompt": work.prompts}),
    )
    if trainer.processing_class(text=work.prompts)["input_ids"] != work.prompt_ids:
        raise SystemExit("TRL's tokenizer makes other ids of the prompts than Headrace's")
    trainer.eos_token_ids = [NO_TOKEN]  # or what follows an end of sequence would not be trained
    measurements = Measurements()
    measured(trainer, work, measurements)
    trainer.train()
    if sender is not None:
        measurements.notes["weights_by_file"] = sender.instead_of
        sender.close()
    measurements.peak_mb = peak_mb()
    checkpointing = trl.GRPOConfig.__dataclass_fields__["gradient_checkpointing"].default
    measurements.notes |= {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "dtype": str(next(trainer.model.parameters()).dtype),
        "gradient_checkpointing": trainer.model.is_gradient_checkpointing,
        "gradient_checkpointing_by_default": checkpointing,
    }
    return measurements


def main() -> None:
    """Read the work from the first file, write the measurements to the second."""
    if len(sys.argv) != 3:
        raise SystemExit("this is one side of a comparison; run `python benchmarks/vs_trl.py`")
    given, wanted = Path(sys.argv[1]), Path(sys.argv[2])
    work = Work(**json.loads(given.read_text()))
    if work.vllm_packages:
        sys.path.append(work.vllm_packages)  # at the end: all that TRL's own environment has comes from there
    measurements = train(work, wanted.parent / "trl")
    wanted.write_text(json.dumps(asdict(measurements)))


if __name__ == "__main__":
    main()
