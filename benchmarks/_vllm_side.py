"""vLLM's CPU build, driven by benchmarks/engine.py; runs in an environment of its own, which has no Headrace.

Takes one JSON object as its argument (model, max_length, max_batch), writes `{"version": ...}` when ready, then for
every line `{"prompts": [[...], ...], "tokens": n}` on standard input one line `{"s": ..., "tokens": [...]}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def open_answers() -> TextIO:
    """Standard output, kept for answers alone: whatever else is printed goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = open_answers()
    options: dict[str, Any] = json.loads(sys.argv[1])

    import vllm  # pyright: ignore[reportMissingImports]

    llm = vllm.LLM(
        model=options["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=options["max_length"],
        max_num_seqs=options["max_batch"],
        max_num_batched_tokens=8192,
        seed=0,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        params = vllm.SamplingParams(temperature=1.0, max_tokens=order["tokens"], ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"s": took, "tokens": counts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
