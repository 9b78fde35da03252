"""A GGUF file becomes an ordinary model folder: float32 safetensors, configuration, mended tokenizer."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import gguf  # noqa: F401  # transformers needs it to read the file; missing, it must say which extra to install
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from headrace.errors import ModelError, boundary
from headrace.models.fit import require_fit

END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the ChatML model in the GGUF `file` to `folder`, dequantised."""
    logging.disable_progress_bar()
    with boundary(ModelError, f"cannot convert {file.name}"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = _load_plain(file)
        _mend_tokenizer(tokenizer, model.config.max_position_embeddings)
        _set_special_ids(model, tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _load_plain(file: Path) -> Any:
    """The model with float32 weights and no trace of quantisation, so that it can be saved and loads as any other."""
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep the packed blocks where a kernel for them exists
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with redirect_stderr(io.StringIO()):  # its progress bar cannot be switched off
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options, output_loading_info=True)
    unpacked, info = loaded
    require_fit(file.name, unpacked, info)
    config: Any = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(unpacked.state_dict())
    return plain


def _mend_tokenizer(tokenizer: Any, max_length: int) -> None:
    for token in (END_OF_TURN, PAD):
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id) and token != tokenizer.unk_token:
            raise ModelError(f"the tokenizer has no {token}; only ChatML models can be converted")
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = PAD
    tokenizer.model_max_length = max_length
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    # the GGUF reader takes every byte-level tokenizer for GPT-2's, but this vocabulary was learnt digit by digit
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _set_special_ids(model: Any, tokenizer: Any) -> None:
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
