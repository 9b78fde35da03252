"""Where does the time of a step go? Headrace's side of the step in vs_trl.py.

    python benchmarks/step_profile.py [--model bundled] [--steps 40] [--json FILE] [--quick]

Prints a Markdown table: milliseconds per step in each part (all calls after the warm-up), and its share of the step.
Indented parts are inside the part above.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import io
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from _arguments import parsed
from _trl_side import Work
from vs_trl import WARM_UP, make_prompts, train_headrace

from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.tokens import TokenTensors
from headrace.engines.torch.lane import Lane
from headrace.models.catalog import resolve_model
from headrace.models.llama import LlamaModel
from headrace.trainer.learner_step import LearnerStep
from headrace.trainer.loops import TrainingLoops
from headrace.weights.sync import WeightSync

PARTS: tuple[tuple[str, type, str], ...] = (
    ("step", TrainingLoops, "_make_step"),
    ("- engine", Lane, "advance"),
    ("  - prefill", LlamaModel, "prefill"),
    ("  - decoding and sampling", LlamaModel, "decode_and_sample"),
    ("- learner", LearnerStep, "learn"),
    ("  - tensors of the tokens", TokenTensors, "__init__"),
    ("  - forward pass", LlamaModel, "hidden"),
    ("  - backward pass", torch.Tensor, "backward"),
    ("- update", TrainingLoops, "_update"),
    ("  - optimizer", LocalBackend, "optim_step"),
    ("  - weight sync", WeightSync, "sync"),
    ("- metrics and callbacks", TrainingLoops, "_end_of_step"),
)
REST = "- the way from one to the next: workflows, judging, the ledger"
Timings = defaultdict[str, list[float]]


def timed(function: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    """The same function, with the seconds of each call noted."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = await function(*arguments, **named)
            taken.append(time.perf_counter() - began)
            return result

        return awaited

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments, **named)
        taken.append(time.perf_counter() - began)
        return result

    return called


def profile(model: str, steps: int) -> dict[str, float]:
    """Milliseconds of a step, by part."""
    folder = resolve_model(model)
    prompts, ids = make_prompts(folder, (WARM_UP + steps) * Work.prompts_per_step)
    taken: Timings = defaultdict(list)
    for name, owner, method in PARTS:
        setattr(owner, method, timed(getattr(owner, method), taken[name]))
    print(f"{WARM_UP + steps} steps of {model} ...", file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        redirect_stdout(io.StringIO()),
    ):  # the folder is temporary
        train_headrace(Work(folder, prompts, ids, WARM_UP + steps), Path(scratch))
    found = {name: 1e3 * _after_warm_up(taken[name], steps) / steps for name, _, _ in PARTS}
    total, *parts = [spent for name, spent in found.items() if not name.startswith(" ")]
    return found | {REST: total - sum(parts)}


def _after_warm_up(taken: list[float], steps: int) -> float:
    """The sum: calls of a part may be of very different lengths."""
    return sum(taken[len(taken) * WARM_UP // (WARM_UP + steps) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="five steps after the warm-up")
    given = parsed(parser, {"steps": 5})
    found = profile(given.model, given.steps)
    total = found[PARTS[0][0]]
    print("\n| part | ms | share |\n| --- | ---: | ---: |")
    for name, spent in found.items():
        print(f"| {name.replace('  ', '&nbsp;&nbsp;')} | {spent:.1f} | {spent / total:.0%} |")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
