"""Make the bundled model: a small Llama trained on Countdown attempts of mixed quality.

    python scripts/make_bundled_model.py [--work runs/bundled] [--out src/headrace/models/bundled]

It builds a tokenizer and random weights, then trains them with Headrace's supervised objective on generated text: first
attempts at the problem, then also problems that ask for a search, and questions whether an expression makes a number.
The result solves Countdown when it searches step by step, but mostly guesses, so reinforcement learning can improve it.
Takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.data.sources.countdown import countdown_demonstrations
from headrace.run.checkpoint import list_checkpoints
from headrace.trainer.trainer import UnifiedTrainer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY, HIDDEN, LAYERS, HEADS, INNER = 512, 128, 4, 4, 384
BATCH = 96


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a token for every small number, ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    corpus = [str(m["content"]) for t in countdown_demonstrations(5000, careful=1.0) for m in t.messages]
    numbers = [f"{number} {number}" for number in range(100)] * 50
    tokenizer.train_from_iterator([*corpus, *numbers, "system user assistant tool " * 50], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),  # type: ignore[arg-type]
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),  # type: ignore[arg-type]
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Phase:
    """One stretch of supervised training."""

    name: str
    steps: int
    lr: float
    data: dict[str, float]


PHASES = (
    Phase("search", 2000, 2e-3, {"careful": 0.3}),
    Phase("hints", 600, 5e-4, {"careful": 0.3, "hinted": 0.2, "checks": 0.15}),
)


def main() -> None:
    """Build, train phase after phase, export in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, default=Path("runs/bundled"), help="finished phases in it are not repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("src/headrace/models/bundled"))
    args = parser.parse_args()
    folder = args.work / "start"
    if not folder.exists():
        tokenizer = make_tokenizer()
        make_model(tokenizer, args.seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for phase in PHASES:
        if not (args.work / phase.name / "finished").exists():
            UnifiedTrainer(phase_config(phase, folder, args.work, args.seed)).fit()
        trained = args.work / f"{phase.name}-model"
        export(args.work / phase.name, folder, trained, torch.float32)
        folder = trained
    export(args.work / PHASES[-1].name, folder, args.out, torch.bfloat16)


def phase_config(phase: Phase, model: Path, work: Path, seed: int) -> RunConfig:
    """The run of one phase."""
    held_out = {"tasks": "countdown", "args": {"split": "test", "count": 200}, "temperature": 1.0}
    return build_config(
        {
            "run": {"name": phase.name, "dir": str(work), "seed": seed},
            "model": {"name": str(model)},
            "data": {"tasks": "countdown_demonstrations", "args": {"count": phase.steps * BATCH, **phase.data}},
            "algorithm": {"objective": "sft"},
            "workflow": {"judger": "countdown"},
            "rollout": {"max_tokens": 100},
            "optimizer": {"lr": phase.lr, "schedule": "cosine", "warmup_steps": 50, "weight_decay": 0.01},
            "trainer": {"steps": phase.steps, "batch_size": BATCH, "save_every": 250},
            "eval": {"every": 250, "sets": {"countdown": held_out}},
        }
    )


def export(run_dir: Path, architecture: Path, out: Path, dtype: torch.dtype) -> None:
    """The newest checkpoint of a run as a model folder."""
    model = LlamaForCausalLM.from_pretrained(architecture)
    model.load_state_dict(load_file(list_checkpoints(run_dir)[-1] / "weights.safetensors"), strict=False)
    shutil.rmtree(out, ignore_errors=True)
    model.to(dtype).save_pretrained(out)  # type: ignore[arg-type]
    PreTrainedTokenizerFast.from_pretrained(architecture).save_pretrained(out)


if __name__ == "__main__":
    main()
