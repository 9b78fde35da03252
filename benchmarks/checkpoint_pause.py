"""How long does a checkpoint pause training? Asynchronous against synchronous writes.

    python benchmarks/checkpoint_pause.py [--model smollm2-135m] [--saves 3] [--json FILE] [--quick]

Prints a Markdown table. The pause is the time that `save` takes. The benchmark waits for the write before the next
save. `--quick` uses the bundled model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.local.backend import LocalBackend
from headrace.config import AlgorithmSection
from headrace.config.loading import build_config
from headrace.data.sample import Sample
from headrace.run.checkpoint import TrainerState, checkpoint_folder
from headrace.run.checkpoint_writer import CheckpointWriter

IMITATE = AlgorithmSection(loss="cross_entropy")


async def measure(model: str, saves: int, asynchronous: bool, scratch: Path) -> tuple[list[float], list[float], float]:
    """Seconds that each save paused training, seconds until it was complete, and megabytes of a checkpoint."""
    config = build_config({"model": {"name": model}, "trainer": {"save_async": asynchronous, "keep_last": 1}})
    backend = LocalBackend(config)
    await _step(backend)  # the optimizer has moments from here on
    writer = CheckpointWriter(scratch, backend, config.trainer)
    pauses, completions = [], []
    for step in range(1, saves + 1):
        began = time.perf_counter()
        await writer.save(TrainerState(step, step, (0, 0), 0))
        pauses.append(time.perf_counter() - began)
        await writer.wait()
        completions.append(time.perf_counter() - began)
    size = sum(path.stat().st_size for path in checkpoint_folder(scratch, saves).rglob("*"))
    await writer.close()
    await backend.close()
    return pauses, completions, size / 2**20


async def _step(backend: LocalBackend) -> None:
    count = 8
    zeros = (0.0,) * (count - 1)
    batch = pack([Sample(tuple(range(count)), (1,) * (count - 1), zeros, (0,) * (count - 1), zeros)], IMITATE, 512)
    await backend.forward_backward(batch, IMITATE)
    await backend.optim_step(1e-5, grad_scale([batch], IMITATE))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    model = "bundled" if given.quick else given.model
    found = {}
    print("| saving | first pause (s) | later pauses (s) | complete after (s) | checkpoint (MB) |")
    print("| --- | --- | --- | --- | --- |")
    for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
        with tempfile.TemporaryDirectory() as scratch:
            pauses, completions, size_mb = asyncio.run(measure(model, given.saves, asynchronous, Path(scratch)))
        later = median(pauses[1:] or pauses)
        found[name] = {"first_s": pauses[0], "later_s": later, "complete_s": median(completions), "mb": size_mb}
        print(f"| {name} | {pauses[0]:.3f} | {later:.3f} | {median(completions):.3f} | {size_mb:.0f} |")
    ratio = found["asynchronous"]["later_s"] / found["synchronous"]["later_s"]
    print(f"\npause, asynchronous / synchronous: {ratio:.3f}")
    if given.json:
        given.json.write_text(json.dumps({"model": model, "ratio": ratio, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
