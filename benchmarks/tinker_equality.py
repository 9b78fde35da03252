"""Does a step through Tinker equal a step of the local backend? Every loss, on random rows, with a real server.

    python benchmarks/tinker_equality.py [LOSS ...] [--batches 3] [--json FILE] [--quick]

Both backends start from the same adapters and make three SGD-like steps (AdamW with eps 1). Compared are the
log-probabilities before each step, the gradient norms, and the final log-probabilities. `one pass` names the loss to
the service; `two passes` computes it here. Prints a Markdown table with the largest differences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.base import Backend
from headrace.backends.local.backend import LocalBackend
from headrace.backends.setup import attach_engine, choose
from headrace.backends.tinker.backend import TinkerBackend
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.sample import Sample
from headrace.engines.base import SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "cross_entropy": {"loss": "cross_entropy"},
    "reinforce": {"loss": "reinforce"},
    "importance_sampling": {"loss": "importance_sampling"},
    "ppo_clip": {"loss": "ppo_clip"},
    "ppo_clip, sequence mean": {"loss": "ppo_clip", "aggregation": "sequence_mean_token_mean", "clip_high": 0.5},
    "ppo_clip, dual clip": {"loss": "ppo_clip", "dual_clip": 2.0},
    "ppo_clip, tis": {"loss": "ppo_clip", "proximal": "recompute", "correction": {"name": "tis"}},
    "ppo_clip, kl": {"loss": "ppo_clip", "kl": {"coef": 0.1}},
    "cispo": {"loss": "cispo", "aggregation": "constant", "aggregation_length": 16},
    "gspo": {"loss": "gspo"},
    "dppo_tv": {"loss": "dppo_tv"},
    "dppo_kl": {"loss": "dppo_kl"},
    "dpo": {"loss": "dpo", "aggregation": "sequence_mean_token_sum"},
}
BUILT_IN = ("cross_entropy", "reinforce", "importance_sampling", "ppo_clip", "ppo_clip, sequence mean", "cispo")
"""Those that the service has; for the others there is one way only."""
STEPS, LR = 3, 5e-4
SETTINGS: dict[str, Any] = {"optimizer": {"eps": 1.0, "grad_clip": 0.0, "weight_decay": 0.1}}


@dataclass(frozen=True, slots=True)
class Course:
    """What one backend found on its way."""

    moved: list[float]
    """Log-probabilities after the last step, less those before the first."""
    numbers: list[float]
    """Everything else: log-probabilities in each step, gradient norms."""


async def random_rows(config: RunConfig, backend: LocalBackend, count: int, seed: int) -> list[Sample]:
    """Rows that the model finds likely, with prompts, trained stretches and advantages of both signs."""
    rng, rows, engine = random.Random(seed), [], attach_engine(config, backend, choose(config)).engine
    for index in range(count):
        params = SamplingParams(max_tokens=rng.randint(6, 30), ignore_eos=True)
        made = await engine.generate([rng.randrange(3, 500) for _ in range(4)], params, seed * count + index)
        mask = [0, 0, 0, *(int(rng.random() < 0.7) for _ in made.completion_ids)]
        mask[-1] = 1
        rows.append(
            Sample(
                tokens=(*made.prompt_ids, *made.completion_ids),
                loss_mask=tuple(mask),
                logprobs=tuple(0.0 for _ in mask),
                versions=tuple(0 for _ in mask),
                advantages=tuple(rng.uniform(-1, 1) for _ in mask),
                task_id=str(index),
            )
        )
    await engine.close()
    return rows


async def sampled(backend: Backend, rows: Sequence[Sample], seed: int) -> list[Sample]:
    """The rows as if a policy near this one had sampled them, with the reference's scores."""
    rng, plain = random.Random(seed), AlgorithmSection()
    ours = await backend.compute_logprobs(pack(rows, plain, 512))
    theirs = await backend.compute_logprobs(pack(rows, plain, 512), of="reference")
    near = [tuple(value + rng.gauss(0, 0.3) for value in row) for row in ours]
    given = zip(rows, near, theirs, strict=True)
    return [replace(row, logprobs=mu, reference_logprobs=tuple(ref)) for row, mu, ref in given]


async def course(backend: Backend, rows: Sequence[Sample], algorithm: AlgorithmSection) -> Course:
    """Some steps on the same rows."""
    together = 2 if algorithm.loss == "dpo" else 1
    batch, numbers = pack(rows, algorithm, 100, together), []
    before = await backend.compute_logprobs(batch)
    for _ in range(STEPS):
        trained = await backend.forward_backward(batch, algorithm)
        numbers += [value for row in trained.logprobs for value in row]
        metrics = await backend.optim_step(LR, grad_scale([batch], algorithm))
        numbers.append(metrics.reduce()["policy/grad_norm"])
    after = await backend.compute_logprobs(batch)
    return Course([b - a for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True)], numbers)


async def compare(name: str, seed: int, one_pass: bool) -> dict[str, float]:
    """The largest differences between the two backends, and how far the policy moved."""
    algorithm = AlgorithmSection(**CASES[name])
    config = build_config({**SETTINGS, "run": {"seed": seed}, "model": {"lora": {"rank": 4}}})
    local = LocalBackend(config)
    tinker = TinkerBackend(
        build_config(
            {
                **SETTINGS,
                "run": {"seed": seed},
                "backend": {**SETTINGS.get("backend", {}), "name": "tinker"},
                "tinker": {"rank": 4, "train_unembed": False},
                "trainer": {"stream": not one_pass},
            }
        )
    )
    rows = await sampled(local, await random_rows(config, local, 8, seed), seed)
    ours, theirs = await course(local, rows, algorithm), await course(tinker, rows, algorithm)
    await local.close()
    await tinker.close()
    return {
        "moved": max(map(abs, ours.moved)),
        "apart": max(abs(a - b) for a, b in zip(ours.moved, theirs.moved, strict=True)),
        "on the way": max(abs(a - b) / max(1, abs(a)) for a, b in zip(ours.numbers, theirs.numbers, strict=True)),
    }


async def table(names: Sequence[str], batches: int) -> dict[str, dict[str, float]]:
    """By loss and way, the worst of some random batches."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        for one_pass in (False, True) if name in BUILT_IN else (False,):
            results = [await compare(name, seed, one_pass) for seed in range(batches)]
            way = "one pass" if one_pass else "two passes"
            found[f"{name} | {way}"] = {key: max(result[key] for result in results) for key in results[0]}
    return found


@contextmanager
def tinker_server(folder: Path, model: str = "bundled", *options: str) -> Iterator[str]:
    """The address of a server that keeps its states in `folder`; ended when the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = ["serve", "tinker", "--model", model, "--port", str(port), "--dir", str(folder / "states"), *options]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.txt"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TINKER_TELEMETRY": "0"}
    with log.open("w") as out:
        server = subprocess.Popen([sys.executable, "-m", "headrace", *words], stdout=out, stderr=out, env=env)
    try:
        _await_healthy(server, url, log)
        yield url
    finally:
        server.terminate()
        server.wait(20)


def _await_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"the server stopped immediately:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", nargs="*", default=list(CASES), metavar="LOSS")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tinker_server(Path(folder)) as url:
        os.environ["TINKER_BASE_URL"], os.environ["TINKER_TELEMETRY"] = url, "0"
        found = asyncio.run(table(args.losses, 1 if args.quick else args.batches))
    print("| loss | method | moved by | final difference | difference before |\n| --- | --- | --- | --- | --- |")
    for name, row in found.items():
        print(f"| {name} | {row['moved']:.3f} | {row['apart']:.1e} | {row['on the way']:.1e} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
