"""How fast is a weight sync to a separate engine process, compared with a plain memory copy?

    python benchmarks/weight_sync.py [--model smollm2-135m] [--rounds 7] [--json FILE] [--quick]

Prints a Markdown table. An optimizer step changes all weights before each sync. The parts of a sync are also measured
one by one: the learner copies its weights into shared memory, the engine digests what it finds there and switches to
it, and the learner digests its own weights at the same time. "switch" is the round trip of an empty call through the
engine's thread; the engine's digest is the rest of the load. All measurements alternate. Shown are medians, with the
lowest and the highest. `--quick` uses the bundled model, which is too small to measure bandwidth.

A plain copy moves as many bytes: with `Tensor.copy_` and the learner's threads, and with numpy, which has one thread
but may be faster, since it bypasses the caches. The memory limit is the faster of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _arguments import parsed
from _tables import print_table, spread
from learner import IMITATE, new_batch

from headrace.algorithms.batching import grad_scale
from headrace.backends.local.backend import LocalBackend
from headrace.config.loading import build_config
from headrace.engines.builtin import torch_engine
from headrace.errors import HeadraceError
from headrace.models.modules import trained_parameters
from headrace.weights.sync import WeightSync

TARGET = 0.5
COPIES = ("plain copy, torch", "plain copy, numpy")
SYNC = "weight sync"
WARM_UP = 2  # the first write to the engine's two buffers
Timings = dict[str, float]


async def timed(call: Awaitable[Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = await call
    return time.perf_counter() - began, result


class SyncedPair:
    """A learner and a separate engine process."""

    def __init__(self, model: str) -> None:
        config = build_config({"model": {"name": model}, "trainer": {"placement": "separate"}})
        self.backend = LocalBackend(config)
        host = self.backend.host("shared_memory")
        self.engine = torch_engine(config, host)
        self._weights, self._sender = host.weights, host.sender
        self._sync = WeightSync(host.weights, host.sender, self.engine)
        self.nbytes = sum(parameter.nbytes for parameter in trained_parameters(self.backend.learner.hf_model))
        self._batch = new_batch(self.backend.learner.hf_model.config.vocab_size, 1, 1, 4, 4)
        self._version = 0
        self._source = torch.ones(self.nbytes // 4)
        self._target = torch.ones(self.nbytes // 4)

    async def step(self) -> None:
        """Change all weights."""
        await self.backend.forward_backward(self._batch, IMITATE)
        await self.backend.optim_step(1e-5, grad_scale([self._batch], IMITATE))

    async def round(self) -> Timings:
        """Seconds of plain copies, of a sync, and of the parts of another sync."""
        await self.step()
        by_torch, _ = await timed(asyncio.to_thread(self._target.copy_, self._source))
        by_numpy, _ = await timed(asyncio.to_thread(np.copyto, self._target.numpy(), self._source.numpy()))
        self._version += 1
        synced, _ = await timed(self._sync.sync(self._version))
        await self.step()
        return {COPIES[0]: by_torch, COPIES[1]: by_numpy, SYNC: synced, **await self._parts()}

    async def _parts(self) -> Timings:
        self._version += 1
        hashed, ours = await timed(self._weights.digest())
        await self.engine.begin_update(self._version)
        staged, _ = await timed(self._sender.send(self._version))
        loaded, theirs = await timed(self.engine.end_update(self._version))
        assert theirs == ours, "the engine holds other weights than the learner"
        taken, _ = await timed(self.engine.resume())  # it is not paused: an empty round trip
        return {
            "learner's digest": hashed,
            "staging copy": staged,
            "engine's digest": max(loaded - taken, 0.0),
            "switch": taken,
        }

    async def close(self) -> None:
        await self.engine.close()
        await self.backend.close()


async def measure(model: str, rounds: int) -> tuple[int, int, list[Timings]]:
    """Bytes of a sync, threads of the learner, and the timings of each round."""
    pair = SyncedPair(model)
    try:
        found = [await pair.round() for _ in range(WARM_UP + rounds)]
    finally:
        await pair.close()
    return pair.nbytes, torch.get_num_threads(), found[WARM_UP:]


def report(nbytes: int, rounds: list[Timings]) -> dict[str, Any]:
    """Per part its seconds, its GB/s, and its speed as a share of each plain copy's in the same round."""
    found = {}
    for name in rounds[0]:
        seconds = [timings[name] for timings in rounds]
        found[name] = {
            "seconds": seconds,
            "gbps": nbytes / median(seconds) / 1e9,
            **{copy: [timings[copy] / timings[name] for timings in rounds] for copy in COPIES},
            "of_sync": median(timings[name] / timings[SYNC] for timings in rounds),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parsed(parser, {"model": "bundled"})
    model = given.model
    try:
        nbytes, threads, rounds = asyncio.run(measure(model, given.rounds))
    except HeadraceError as error:
        sys.exit(f"error: {error}")
    found = report(nbytes, rounds)
    print(f"{model}: {nbytes / 1e6:.0f} MB, learner with {threads} threads")
    print_table(
        ["", "milliseconds", "GB/s", *(f"speed / {copy}" for copy in COPIES), "seconds / weight sync"],
        [
            [
                name,
                spread([1e3 * seconds for seconds in row["seconds"]], 1),
                f"{row['gbps']:.1f}",
                *(spread(row[copy]) for copy in COPIES),
                f"{row['of_sync']:.2f}",
            ]
            for name, row in found.items()
        ],
    )
    shares = {copy: median(found[SYNC][copy]) for copy in COPIES}
    print("\nspeed of a weight sync:", "; ".join(f"{share:.0%} of a {copy}" for copy, share in shares.items()))
    print(f"the target is {TARGET:.0%} of a copy")
    if given.json:
        out = {"model": model, "bytes": nbytes, "threads": threads, "shares": shares, "target": TARGET, "parts": found}
        given.json.write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
