"""Five minutes on a GPU: is it right, does it learn, how fast is it, how much memory does it take?

    .venv/bin/python scripts/check_gpu.py [--device cuda] [--quick]

Compares the learner and the engine on the device with the CPU, runs the demo there, measures tokens per second and
peak memory, and prints a report in Markdown to paste into an issue. `--device cpu` tries the script itself: everything
runs through the same forward pass of transformers. Exit code 0 if all checks passed, 1 if one failed, 2 if there is
nothing to check.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import platform
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.learner import Learner
from headrace.backends.setup import attach_engine, choose
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config, load_config
from headrace.data.sample import Sample
from headrace.engines.base import SamplingParams
from headrace.models.device import accelerators, describe, resolve_device, synchronize
from headrace.trainer.trainer import UnifiedTrainer

EXAMPLE = Path(__file__).parent.parent / "examples" / "countdown.toml"
IMITATE = AlgorithmSection(loss="cross_entropy")
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Of log-probabilities on the device, compared with float32 on the CPU."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    passed: bool
    found: str


def samples(count: int, vocabulary: int, longest: int) -> list[Sample]:
    """Rows of different lengths; every other one begins as the one before."""
    chance = random.Random(0)
    found: list[Sample] = []
    for number in range(count):
        length = chance.randint(longest // 2, longest)
        ids = [chance.randrange(vocabulary) for _ in range(length)]
        if number % 2:
            ids[: longest // 3] = found[-1].tokens[: longest // 3]
        zeros = (0.0,) * (length - 1)
        ones = tuple(chance.uniform(-1, 1) for _ in zeros)
        found.append(Sample(tuple(ids), (1,) * (length - 1), zeros, (0,) * (length - 1), ones))
    return found


def settings(device: str, dtype: str, **more: Any) -> RunConfig:
    """A run of the bundled model on a device; on the CPU through the forward pass of transformers, too."""
    model = {"name": "bundled", "device": device, "dtype": dtype, **({"fast_path": False} if device == "cpu" else {})}
    return build_config({"model": {**model, **more.pop("model", {})}, **more})


def loss_curve(config: RunConfig, rows: list[Sample], steps: int) -> tuple[list[float], list[list[float]]]:
    """(loss of each step, log-probabilities before the first)."""
    learner = Learner(config)
    batch = pack(rows, IMITATE, 1024)
    before, losses = learner.logprobs(batch), []
    for _ in range(steps):
        losses.append(learner.forward_backward(batch, IMITATE).metrics.reduce()["policy/loss"])
        learner.optim_step(1e-3, grad_scale([batch], IMITATE))
    return losses, before


def furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(abs(a - b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))


def check_learner(device: str, dtype: str, **more: Any) -> Iterator[Check]:
    """Scores and five steps of training, against float32 on the CPU."""
    rows = samples(12, 90, 120)
    reference = build_config({**more, "model": {"device": "cpu", **more.get("model", {})}})  # the fast path
    want, wanted = loss_curve(reference, rows, 5)
    got, scores = loss_curve(settings(device, dtype, **dict(more)), rows, 5)
    off, limit = furthest(scores, wanted), TOLERANCE[dtype]
    name = f"{dtype}{', adapters' if more else ''}"
    yield Check(f"log-probabilities ({name})", off <= limit, f"off by {off:.2g}, allowed {limit:g}")
    drift = max(abs(a - b) for a, b in zip(want, got, strict=True))
    falls = got[-1] < got[0]
    yield Check(
        f"5 steps ({name})", drift <= 2 * limit and falls, f"loss {got[0]:.3f} → {got[-1]:.3f}, off by {drift:.2g}"
    )


def check_checkpoint(device: str) -> Iterator[Check]:
    """Written on the device, read on the CPU."""
    rows = samples(6, 90, 60)
    batch = pack(rows, IMITATE, 512)
    there, here = Learner(settings(device, "float32")), Learner(settings("cpu", "float32"))
    there.forward_backward(batch, IMITATE)
    there.optim_step(1e-3, grad_scale([batch], IMITATE))
    with tempfile.TemporaryDirectory() as folder:
        there.save(Path(folder))
        here.load(Path(folder))
    off = furthest(there.logprobs(batch), here.logprobs(batch))
    yield Check("a checkpoint crosses to the CPU", off <= TOLERANCE["float32"], f"off by {off:.2g}")


async def sample_on(config: RunConfig, prompts: list[list[int]], tokens: int) -> tuple[list[Any], float, float]:
    """(generations, seconds, largest difference of the sampler's log-probabilities from the learner's)."""
    backend = LocalBackend(config)
    policy = attach_engine(config, backend, choose(config))
    await policy.sync.sync(1)
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    await asyncio.gather(*(policy.engine.generate(p, params, i) for i, p in enumerate(prompts)))  # warm-up
    synchronize(backend.learner.device)
    began = time.perf_counter()
    made = await asyncio.gather(*(policy.engine.generate(p, params, i) for i, p in enumerate(prompts)))
    synchronize(backend.learner.device)
    seconds = time.perf_counter() - began
    rows = [
        Sample((*g.prompt_ids, *g.completion_ids), *(((1,) * n, (0.0,) * n, (1,) * n, (0.0,) * n)))
        for g in made
        for n in [len(g.prompt_ids) + len(g.completion_ids) - 1]
    ]
    scored = await backend.compute_logprobs(pack(rows, IMITATE, 4096))
    off = max(
        abs(a - b)
        for g, row in zip(made, scored, strict=True)
        for a, b in zip(g.logprobs, row[-len(g.completion_ids) :], strict=True)
    )
    await policy.engine.close()
    await backend.close()
    return made, seconds, off


def check_engine(device: str, dtype: str) -> Iterator[Check]:
    """The engine samples on the device; learner and sampler agree on what it sampled."""
    prompts = [list(range(3, 3 + 20 + i)) for i in range(16)]
    made, seconds, off = asyncio.run(sample_on(settings(device, dtype), prompts, 64))
    count = sum(len(one.completion_ids) for one in made)
    limit = TOLERANCE[dtype]
    yield Check(f"sampler and learner agree ({dtype})", off <= limit, f"off by {off:.2g}, allowed {limit:g}")
    yield Check(
        f"sampling ({dtype})", count == 16 * 64, f"{count / seconds:,.0f} tokens/s, 16 sequences, bundled model"
    )


def check_speed(device: str) -> Iterator[Check]:
    """Trained tokens per second, with the default types of the device."""
    learner = Learner(settings(device, "auto"))
    batch = pack(samples(64, 90, 200), IMITATE, 4096)
    tokens = sum(len(one.tokens) for one in batch.samples)
    learner.forward_backward(batch, IMITATE)
    metrics = learner.optim_step(1e-4, grad_scale([batch], IMITATE)).reduce()
    synchronize(learner.device)
    began = time.perf_counter()
    for _ in range(5):
        learner.forward_backward(batch, IMITATE)
        metrics = learner.optim_step(1e-4, grad_scale([batch], IMITATE)).reduce()
    synchronize(learner.device)
    speed = 5 * tokens / (time.perf_counter() - began)
    peak = metrics.get("memory/device_train_peak_mb")
    shown = f", peak {peak:,.0f} MB" if peak is not None else ""
    yield Check("training speed", True, f"{speed:,.0f} tokens/s{shown}; {learner.where}")


def check_demo(device: str, steps: int) -> Iterator[Check]:
    """The example learns."""
    print(f"the demo: {steps} steps of {EXAMPLE.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--run.dir={folder}", f"--model.device={device}", f"--trainer.steps={steps}", "--track.plot=false"]
        words += [
            "--eval.every=0",
            '--track.trackers=["jsonl"]',
            *(["--model.fast_path=false"] if device == "cpu" else []),
        ]
        began = time.perf_counter()
        with redirect_stdout(io.StringIO()):  # it would recommend a folder that is deleted below
            result = UnifiedTrainer(load_config(EXAMPLE, words)).fit()
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = [line["eval/countdown/pass@1"] for line in lines if "eval/countdown/pass@1" in line]
    last = next(line for line in reversed(lines) if line["step"] and "tokens/generated_per_s" in line)
    peaks = {key: value for key, value in last.items() if key.startswith("memory/device_")}
    found = f"pass@1 {scores[0]:.1%} → {scores[-1]:.1%} in {steps} steps, {seconds:.0f} s; "
    found += f"{last['tokens/generated_per_s']:,.0f} generated and {last['tokens/trained_per_s']:,.0f} trained tokens/s"
    found += "".join(f"; {key} {value:,.0f}" for key, value in peaks.items())
    yield Check("the demo learns", scores[-1] > scores[0] + 0.1, found)


def attempt(name: str, work: Callable[[], Iterator[Check]]) -> list[Check]:
    """The checks of one part; a part that fails is a line of the report, not its end."""
    try:
        return list(work())
    except Exception as error:
        traceback.print_exc()
        return [Check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])]


def machine(device: str) -> list[tuple[str, str]]:
    found = [("Headrace on", f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
              f"{transformers.__version__}, CUDA {torch.version.cuda}, {platform.platform()}")]  # fmt: skip
    for one in accelerators():
        memory = f"{one.memory / 2**30:.1f} GiB" if one.memory else "memory not known"
        found.append((str(one.device), f"{one.name}, {memory}, capability {one.capability or 'not known'}"))
    chosen = resolve_device(device)
    return [*found, ("checked", str(chosen) if chosen.type == "cpu" else f"{chosen}: {describe(chosen).name}")]


def main(words: Sequence[str] | None = None) -> int:
    """Run all checks and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="as model.device")
    parser.add_argument("--quick", action="store_true", help="a shorter demo")
    given = parser.parse_args(words)
    if given.device == "auto" and not accelerators():
        print("error: this machine has no accelerator that torch sees (headrace doctor says why); to try the script "
              "itself on the CPU, give --device cpu", file=sys.stderr)  # fmt: skip
        return 2
    device = str(resolve_device(given.device))
    narrow = "bfloat16" if device != "cpu" and describe(torch.device(device)).bfloat16 else "float32"
    adapters = {"model": {"lora": {"rank": 8}}}
    parts: dict[str, Callable[[], Iterator[Check]]] = {
        "learner in float32": lambda: check_learner(device, "float32"),
        "adapters": lambda: check_learner(device, "float32", **adapters),
        "checkpoint": lambda: check_checkpoint(device),
        "engine in float32": lambda: check_engine(device, "float32"),
        "speed": lambda: check_speed(device),
        "demo": lambda: check_demo(device, 10 if given.quick else 30),
    }
    if narrow != "float32":
        parts |= {
            f"learner in {narrow}": lambda: check_learner(device, narrow),
            f"engine in {narrow}": lambda: check_engine(device, narrow),
        }
    checks = [check for name, work in parts.items() for check in attempt(name, work)]
    title = "Report of the CPU: no GPU was checked" if device == "cpu" else "GPU report"
    print(f"\n## {title}\n\n| | |\n| --- | --- |")
    print("\n".join(f"| {name} | {value} |" for name, value in machine(given.device)))
    print("\n| check | result | found |\n| --- | --- | --- |")
    print("\n".join(f"| {one.name} | {'passed' if one.passed else '**failed**'} | {one.found} |" for one in checks))
    failed = sum(not one.passed for one in checks)
    print(f"\n{len(checks) - failed} of {len(checks)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
