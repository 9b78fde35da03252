"""What does Headrace cost between an agent and vLLM? And how long does a weight sync take, compared with a copy?

    python benchmarks/vllm_overhead.py [--model smollm2-135m] [--in-flight 64 256] [--tokens 64] [--rounds 3]
                                       [--vllm-python PYTHON] [--json FILE] [--quick]

One vLLM server, the same requests twice: by `VllmEngine`, and by a bare asyncio client that writes the same bodies to
open connections and reads the answers as JSON. They alternate. Shown are tokens per second, the ratio of the two in
the same round, and the processor time of the client's side per token: on few cores it is taken from the server. Then
weight syncs by transport "file", with their proofs, against a plain copy of as many bytes. Medians, with the lowest and
the highest. Without `--vllm-python` the environment .venv-vllm is used, and made if it is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _arguments import parsed
from _environments import environment, with_module
from _tables import print_table, spread

from headrace.backends.local.backend import LocalBackend
from headrace.backends.setup import attach_engine, choose
from headrace.config.loading import build_config
from headrace.engines.base import SamplingParams
from headrace.engines.request import Request
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.messages import generate_body

TARGET = 0.95
PROMPT = 24


class BareClient:
    """As little as can be done: one connection per request in flight, nothing checked."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def generate(self, body: dict[str, Any]) -> int:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, int(self._port))
        content = json.dumps(body).encode()
        head = (
            f"POST /inference/v1/generate HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answered.split("content-length: ")[1].split("\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        self._idle.append((reader, writer))
        return len(answer["choices"][0]["token_ids"])

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(PROMPT)] for _ in range(count)]


@dataclass(frozen=True)
class Clock:
    """When work began, by the clock on the wall and by this process's own."""

    wall: float = field(default_factory=time.perf_counter)
    own: float = field(default_factory=time.process_time)

    def rate(self, tokens: int) -> tuple[float, float]:
        """Tokens per second, and microseconds of this process per token."""
        return tokens / (time.perf_counter() - self.wall), 1e6 * (time.process_time() - self.own) / tokens


async def by_headrace(engine: VllmEngine, rows: list[list[int]], tokens: int) -> tuple[float, float]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    clock = Clock()
    made = await asyncio.gather(*(engine.generate(row, params, seed) for seed, row in enumerate(rows)))
    return clock.rate(sum(len(one.completion_ids) for one in made))


async def by_bare_client(engine: VllmEngine, rows: list[list[int]], tokens: int) -> tuple[float, float]:
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=tokens, stop=(), ignore_eos=True)
    limit = engine.max_model_length
    made = [Request.new(tuple(row), params, seed, limit, frozenset(), None) for seed, row in enumerate(rows)]
    bodies = [generate_body(one, "policy", "bare", False, 0) for one in made]
    client = BareClient(engine.server.url)
    clock = Clock()
    counts = await asyncio.gather(*map(client.generate, bodies))
    rate = clock.rate(sum(counts))
    client.close()
    return rate


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    python = with_module(given.vllm_python, "vllm", "--vllm-python") if given.vllm_python else environment(
        "vllm", "--vllm-python", exact=True
    )  # fmt: skip
    widest = max(given.in_flight)
    config = build_config(
        {
            "run": {"dir": str(folder), "name": "bench"},
            "model": {"name": given.model},
            "trainer": {"placement": "separate"},
            "engine": {"name": "vllm", "python": str(python), "max_batch": widest, "max_model_length": 512},
        }
    )
    choice = choose(config)
    backend = LocalBackend(config)
    policy = attach_engine(config, backend, choice)
    engine = policy.engine
    assert isinstance(engine, VllmEngine)
    try:
        await policy.sync.sync(1)
        vocabulary = backend.learner.hf_model.config.vocab_size
        rates: dict[int, list[tuple[Any, Any]]] = {count: [] for count in given.in_flight}
        await by_headrace(engine, prompts(8, vocabulary, 99), 4)
        for number in range(given.rounds):
            for count in given.in_flight:
                sides = (by_headrace, by_bare_client)
                found = {}
                for side in sides if number % 2 else sides[::-1]:
                    rows = prompts(count, vocabulary, 2 * number + sides.index(side))  # no prefix is cached
                    found[side] = await side(engine, rows, given.tokens)
                rates[count].append((found[by_headrace], found[by_bare_client]))
        return {"rates": rates, **await measure_syncs(policy, backend, given.rounds)}
    finally:
        await engine.close()
        await backend.close()


async def measure_syncs(policy: Any, backend: LocalBackend, rounds: int) -> dict[str, Any]:
    nbytes = sum(parameter.nbytes for parameter in backend.learner.hf_model.parameters())
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    syncs, copies = [], []
    parts = timed(policy)
    for version in range(2, 2 + max(3, rounds)):
        began = time.perf_counter()
        await policy.sync.sync(version)
        syncs.append(time.perf_counter() - began)
        began = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - began)
    return {"bytes": nbytes, "sync_s": syncs, "copy_s": copies, "parts_s": parts}


def timed(policy: Any) -> dict[str, list[float]]:
    """What the parts of each weight sync take from now on."""
    parts: dict[str, list[float]] = {}

    def watch(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        async def watched(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(*given)
            finally:
                parts.setdefault(name, []).append(time.perf_counter() - began)

        setattr(owner, name, watched)

    for name in ("pause", "begin_update", "end_update", "compute_logprobs", "resume"):
        watch(policy.engine, name)
    watch(policy.sync._sender, "send")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parsed(parser, {"model": "bundled", "tokens": 16, "rounds": 1, "in_flight": [16]})
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(given, Path(folder)))
    rows, ratios = [], {}
    for count, pairs in found["rates"].items():
        ratios[count] = [ours[0] / bare[0] for ours, bare in pairs]
        columns = [[pair[side][which] for pair in pairs] for which in (0, 1) for side in (0, 1)]
        ours, bare, ours_us, bare_us = (spread(column, 0) for column in columns)
        rows.append([str(count), ours, bare, spread(ratios[count]), ours_us, bare_us])
    sides = ("Headrace", "bare client")
    rates, times = ([f"{side}, {what}" for side in sides] for what in ("tokens/s", "µs/token"))
    print_table(["in flight", *rates, "ratio", *times], rows)
    print(f"\nthe target is a ratio of {TARGET}")
    syncs, copies = found["sync_s"], found["copy_s"]
    print(f"weight sync of {found['bytes'] / 1e6:.0f} MB: {spread(syncs)} s; a plain copy: {spread(copies, 3)} s")
    print("; ".join(f"{name} {spread(values, 3)} s" for name, values in found["parts_s"].items()))
    if given.json:
        out = {"model": given.model, "ratios": ratios, "target": TARGET, **found}
        given.json.write_text(json.dumps(out, indent=2) + "\n")
    if median(median(values) for values in ratios.values()) < TARGET and not given.quick:
        print("below the target")


if __name__ == "__main__":
    main()
