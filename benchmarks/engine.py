"""How fast is the built-in engine, compared with transformers, vLLM and the hardware limit?

    python benchmarks/engine.py [--model smollm2-135m] [--batches 1 8 32 64 128] [--rounds 3]
                                [--weights bfloat16 int8] [--forward transformers] [--vllm] [--json FILE] [--quick]

All sides sample at temperature 1 from the same weights in float32, with the same threads, after random prompts that are
equally long and have no common prefix: the engine, transformers `generate` with a dynamic and with a static cache,
neither compiled, and with `--vllm` vLLM's CPU build, whose environment is created in .venv-vllm unless --vllm-python
names one. Each side has its own process, and they alternate in every round. `--weights` also measures the engine with
other values of `engine.weights`. With `--forward transformers` the engine decodes through the model's own forward, and
is also compared with itself decoding one sequence at a time.
Prefill is a run of one new token, so it includes the first reply token; decoding is the extra time of a run of 64 more
tokens. The engine also returns each token's log-probability; the others do not.

The roof is the larger of two times: the matrix products that the model's layers need for so many rows (by torch, by MKL
with weights packed for the purpose, or by the engine's own product, whichever is fastest), and one reading of the
weights at the measured bandwidth; with the output head for decoding, without it for prefill. It is measured in every
round, and the fastest counts. A share is roof time over measured time: the rest is attention, norms, sampling and
overhead, and products slower than the fastest. Prints Markdown tables: medians, and the ratios' spread over rounds.
 `--quick`: the bundled model, batches 1 and 32, one round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from _arguments import parsed
from _environments import environment, with_module
from roof import products, read_gbps, stack_seconds, weight_bytes
from transformers import AutoConfig, GenerationConfig

import headrace
from headrace.backends.local.backend import LocalBackend
from headrace.backends.setup import attach_engine, choose
from headrace.config import ModelSection
from headrace.config.loading import build_config
from headrace.engines.base import SamplingParams
from headrace.errors import HeadraceError
from headrace.models.catalog import resolve_model
from headrace.models.load import load_model
from headrace.models.tensor_threads import run_apart

NEW_TOKENS = 64
QUIET_S = 1.0  # after which the engine's threads no longer take the last side for other work on the machine
FIRST_REPEATS = 3
"""Runs of one token are short, so each round takes the median of several."""
WARM_TOKENS = 8
ONE_BY_ONE = "one by one"
MOST_ROWS = 2048
"""More rows make a product no faster per row, so the roof of a longer prefill is that of its pieces."""
Prompts = list[list[int]]
Measurements = dict[str, float]


class Engine:
    """The built-in engine as agents use it: one `generate` per sequence, all awaited together."""

    def __init__(self, model: str, max_batch: int, weights: str = "float32", forward: str = "fast") -> None:
        self._runner = asyncio.Runner()
        settings: dict[str, Any] = {"model": {"name": model}, "engine": {"max_batch": max_batch, "weights": weights}}
        if forward != "fast":
            settings["model"]["fast_path"] = False
        if forward == ONE_BY_ONE:
            settings["run"] = {"deterministic": True}
        config = build_config(settings)
        self._engine = attach_engine(config, LocalBackend(config), choose(config)).engine

    def seconds(self, prompts: Prompts, tokens: int) -> float:
        return self._runner.run(self._generate(prompts, tokens))

    async def _generate(self, prompts: Prompts, tokens: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        done = await asyncio.gather(*(self._engine.generate(ids, params, seed) for seed, ids in enumerate(prompts)))
        took = time.perf_counter() - began
        check_counts("engine", [len(generation.completion_ids) for generation in done], tokens)
        return took

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


class Apart:
    """A side in a process of its own, which waits for orders between its turns: no side's idle threads slow another."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=os.environ | environment,
        )  # fmt: skip
        self.version: str = self._answer()["version"]

    def seconds(self, prompts: Prompts, tokens: int) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        check_counts(self.name, answer["tokens"], tokens)
        return answer["s"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            said = [text for text in self._log.read().splitlines() if "Error" in text] or ["nothing"]
            raise SystemExit(f"{self.name} has stopped, and says: {said[-1].strip()}; mend it, or leave it out")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


def start_engine(model: str, max_batch: int, threads: int, *, weights: str = "float32", forward: str = "fast") -> Apart:
    """The built-in engine."""
    name = forward if forward == ONE_BY_ONE else "engine" if weights == "float32" else weights
    given = json.dumps({"max_batch": max_batch, "weights": weights, "forward": forward})
    command = [sys.executable, __file__, "--model", model, "--threads", str(threads), "--be-engine", given]
    return Apart(name, command, {})


def be_engine(model: str, given: dict[str, Any]) -> None:
    """Answer orders."""
    engine = Engine(model, **given)
    print(json.dumps({"version": headrace.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        took = engine.seconds(order["prompts"], order["tokens"])
        print(json.dumps({"s": took, "tokens": [order["tokens"]]}), flush=True)
    engine.close()


def start_transformers(model: str, cache: str, threads: int) -> Apart:
    """`generate` of transformers with one kind of cache."""
    command = [sys.executable, __file__, "--model", model, "--threads", str(threads), "--be-transformers", cache]
    return Apart(cache, command, {"OMP_NUM_THREADS": str(threads)})


def be_transformers(model: str, cache: str) -> None:
    """Answer orders: sample from the full distribution, ignore the end of sequence."""
    hf_model: Any = load_model(ModelSection(name=model))
    hf_model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    print(json.dumps({"version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        ids_BT = torch.tensor(order["prompts"])
        began = time.perf_counter()
        out_BT = hf_model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=order["tokens"],
            cache_implementation=cache,
            disable_compile=True,
        )
        took = time.perf_counter() - began
        print(json.dumps({"s": took, "tokens": [out_BT.shape[1] - ids_BT.shape[1]]}), flush=True)


def start_vllm(python: Path, model: str, max_batch: int, max_length: int, threads: int) -> Apart:
    """vLLM's CPU build, in an environment of its own."""
    options = {"model": resolve_model(model), "max_batch": max_batch, "max_length": max_length}
    command = [str(python), str(Path(__file__).with_name("_vllm_side.py")), json.dumps(options)]
    return Apart("vllm", command, _vllm_environment(threads))


def _vllm_environment(threads: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less between question and answer
        "VLLM_NO_USAGE_STATS": "1",
    }


def check_counts(name: str, counts: Sequence[int], tokens: int) -> None:
    """Equal work on all sides is the point of the comparison."""
    if set(counts) != {tokens}:
        raise SystemExit(f"{name} made {sorted(set(counts))} tokens where {tokens} were asked for; no fair comparison")


def new_prompts(rng: random.Random, batch: int, length: int, vocabulary: int) -> Prompts:
    """Random ids: no two prompts share a prefix, in any run."""
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(batch)]


def measure(side: Apart, batch: int, length: int, vocabulary: int, rng: random.Random) -> Measurements:
    """Tokens per second of prefill and of decoding, and the seconds that they come from."""

    def run(tokens: int) -> float:
        return side.seconds(new_prompts(rng, batch, length, vocabulary), tokens)

    time.sleep(QUIET_S)
    first_s = median(run(1) for _ in range(FIRST_REPEATS))
    decode_s = run(1 + NEW_TOKENS) - first_s
    return {
        "prefill_s": first_s,
        "decode_step_s": decode_s / NEW_TOKENS,
        "prefill": batch * length / first_s,
        "decode": batch * NEW_TOKENS / decode_s,
    }


def roof(config: Any, batch: int, length: int) -> Measurements:
    """Seconds of the products, and of reading the weights, for the prefill of a batch and one step of decoding."""
    rows = min(batch * length, MOST_ROWS)
    found: Measurements = {}
    for name in products():
        repeats = 1 if rows > 1000 else 3
        pieces = batch * length / rows
        found[f"prefill_{name}_s"] = pieces * stack_seconds(rows, config, False, name, repeats)
        found[f"decode_step_{name}_s"] = stack_seconds(batch, config, product=name)
    for what, head in (("prefill", False), ("decode_step", True)):
        size = weight_bytes(config, head)
        # as much memory as the weights take: what fits into the caches is read faster
        found[f"{what}_reading_s"] = size / read_gbps(-(-size // 2**20)) / 1e9
    return found


def compare(sides: Sequence[Apart], config: Any, batches: Sequence[int], rounds: int, length: int) -> dict[int, Any]:
    """Per batch size: the roof, and the measurements of each side and round."""
    rng = random.Random(0)
    found: dict[int, Any] = {}
    for batch in batches:
        for side in sides:
            side.seconds(new_prompts(rng, batch, length, config.vocab_size), WARM_TOKENS)
        measurements: dict[str, list[Measurements]] = {side.name: [] for side in sides}
        roofs: list[Measurements] = []
        for number in range(rounds):
            roofs.append(run_apart(partial(roof, config, batch, length)))
            for side in sides:
                measurements[side.name].append(measure(side, batch, length, config.vocab_size, rng))
            print(f"batch {batch}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        fastest = {key: min(one[key] for one in roofs) for key in roofs[0]}
        for what in ("prefill", "decode_step"):
            products_s = min(fastest[f"{what}_{name}_s"] for name in products())
            fastest[f"{what}_s"] = max(products_s, fastest[f"{what}_reading_s"])
        found[batch] = {"roof": fastest, "rounds": measurements, "summary": summarise(measurements, fastest)}
    return found


def summarise(measurements: dict[str, list[Measurements]], fastest: Measurements) -> dict[str, Any]:
    """For prefill and decoding: medians, the engine's ratio to the others per round, its share of the roof."""
    found: dict[str, Any] = {}
    for what, seconds in (("prefill", "prefill_s"), ("decode", "decode_step_s")):
        ours = measurements["engine"]
        ratios = {
            name: [one[what] / other[what] for one, other in zip(ours, theirs, strict=True)]
            for name, theirs in measurements.items()
            if name != "engine"
        }
        found[what] = {
            "tokens_per_s": {name: median(one[what] for one in rows) for name, rows in measurements.items()},
            "times": {name: [median(some), min(some), max(some)] for name, some in ratios.items()},
            "share_of_roof": fastest[seconds] / median(one[seconds] for one in ours),
        }
    return found


def table(found: dict[int, Any], what: str, others: Sequence[str]) -> str:
    """In Markdown, with the ratios' spread over rounds."""
    lines = ["| batch | engine tok/s | × dynamic | × static | × vLLM | share of roof |", "| ---: " * 6 + "|"]
    for batch, at in found.items():
        row = at["summary"][what]
        cells = [f"{row['tokens_per_s']['engine']:,.0f}"]
        cells += [_spread(row["times"][name]) if name in row["times"] else "left out" for name in others]
        lines.append(f"| {batch} | {' | '.join(cells)} | {row['share_of_roof']:.0%} |")
    return "\n".join(lines)


def weights_table(found: dict[int, Any], weights: Sequence[str]) -> str:
    """Decoding with weights in fewer bits, against float32, in Markdown."""
    lines = [f"| batch | {' | '.join(weights)} |", "| ---: " * (1 + len(weights)) + "|"]
    for batch, at in found.items():
        slower = [at["summary"]["decode"]["times"][name] for name in weights]  # what float32 has over them
        lines.append(f"| {batch} | {' | '.join(_spread([1 / x for x in (a, c, b)]) for a, b, c in slower)} |")
    return "\n".join(lines)


def _spread(times: Sequence[float]) -> str:
    middle, least, most = times
    return f"{middle:.2f} ({least:.2f}–{most:.2f})"


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Start all sides, compare, stop them."""
    most, longest = max(given.batches), given.prompt_tokens + 1 + NEW_TOKENS
    found: dict[str, Any] = {"model": given.model, "threads": given.threads, "prompt_tokens": given.prompt_tokens}
    config = AutoConfig.from_pretrained(resolve_model(given.model))
    start = partial(start_engine, given.model, most, given.threads)
    sides = [start(forward=given.forward)]
    try:
        sides += [start(forward=ONE_BY_ONE)] if given.forward == "transformers" else []
        sides += [start(weights=weights) for weights in given.weights]
        sides += [start_transformers(given.model, cache, given.threads) for cache in ("dynamic", "static")]
        if given.vllm_python:
            vllm = start_vllm(given.vllm_python, given.model, most, longest, given.threads)
            found["vllm"] = vllm.version
            sides.append(vllm)
        found["batches"] = compare(sides, config, given.batches, given.rounds, given.prompt_tokens)
    finally:
        for side in sides:
            side.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--weights",
        nargs="*",
        default=[],
        choices=["bfloat16", "int8"],
        help="measure these too",
    )
    parser.add_argument("--forward", choices=["fast", "transformers"], default="fast", help="the engine's forward pass")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's CPU build: 3 GB to install")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the bundled model, batches 1 and 32, one round")
    parser.add_argument("--be-engine", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--be-transformers", metavar="CACHE", help=argparse.SUPPRESS)
    given = parsed(parser, {"model": "bundled", "batches": [1, 32], "rounds": 1})
    torch.set_num_threads(given.threads)
    if given.be_engine:
        be_engine(given.model, given.be_engine)
        return
    if given.be_transformers:
        be_transformers(given.model, given.be_transformers)
        return
    option = "--vllm-python"
    if given.vllm_python:
        with_module(given.vllm_python, "vllm", option)
    elif given.vllm:
        given.vllm_python = environment("vllm", option, exact=True)
    try:
        found = run(given)
    except HeadraceError as error:
        raise SystemExit(str(error)) from None
    for what in ("prefill", "decode"):
        print(f"\n{what}, {given.model}\n\n{table(found['batches'], what, ('dynamic', 'static', 'vllm'))}")
    if given.weights:
        print(f"\ndecoding, times as fast as with float32\n\n{weights_table(found['batches'], given.weights)}")
    if given.forward == "transformers":
        print("\ndecoding, times as fast as one by one\n\n| batch | × |\n| ---: | ---: |")
        for batch, at in found["batches"].items():
            print(f"| {batch} | {_spread(at['summary']['decode']['times'][ONE_BY_ONE])} |")
    if not given.vllm_python:
        print("\nvLLM was left out: --vllm has it compared")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
