"""Make the bundled model: a small Llama that has read attempts at Countdown of mixed quality.

    python scripts/make_bundled_model.py [--steps 3000] [--work runs] [--out src/headrace/models/bundled]

It builds a tokenizer and random weights, then trains them with Headrace's own supervised objective on generated
text. The result can solve Countdown when it works step by step, and mostly guesses instead, so that reinforcement
learning has something to improve. Takes about half an hour on two cores; the seed makes it reproducible.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.data.countdown import countdown_demonstrations
from headrace.runfile import build_config
from headrace.trainer import UnifiedTrainer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY, HIDDEN, LAYERS, HEADS, INNER = 512, 128, 4, 4, 384


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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Build, train, export in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--careful", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("src/headrace/models/bundled"))
    args = parser.parse_args()
    start = args.work / "bundled-start"
    tokenizer = make_tokenizer()
    make_model(tokenizer, args.seed).save_pretrained(start)
    tokenizer.save_pretrained(start)
    config = build_config(
        {
            "run": {"name": "bundled-sft", "dir": str(args.work), "seed": args.seed},
            "model": {"name": str(start)},
            "data": {
                "tasks": "countdown_demonstrations",
                "args": {"count": args.steps * args.batch, "careful": args.careful},
            },
            "algorithm": {"objective": "sft"},
            "workflow": {"judger": "countdown"},
            "rollout": {"max_tokens": 100},
            "optimizer": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 50, "weight_decay": 0.01},
            "trainer": {"steps": args.steps, "batch_size": args.batch, "save_every": 250},
            "eval": {
                "every": 250,
                "sets": {
                    "countdown": {
                        "tasks": "countdown",
                        "args": {"split": "test", "count": 200},
                        "temperature": 1.0,
                    }
                },
            },
        }
    )
    result = UnifiedTrainer(config).fit()
    export(result.run_dir, start, args.out)


def export(run_dir: Path, start: Path, out: Path) -> None:
    """The newest checkpoint as a model folder, rounded to bfloat16."""
    from safetensors.torch import load_file

    from headrace.checkpoint import list_checkpoints

    model = LlamaForCausalLM.from_pretrained(start)
    model.load_state_dict(load_file(list_checkpoints(run_dir)[-1] / "weights.safetensors"), strict=False)
    shutil.rmtree(out, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    PreTrainedTokenizerFast.from_pretrained(start).save_pretrained(out)


if __name__ == "__main__":
    main()
