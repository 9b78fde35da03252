"""How close are the learner's forward and backward passes to the hardware limit?

    python benchmarks/learner.py [PART ...] [--model smollm2-135m] [--rounds 3] [--json FILE] [--quick]

Prints a Markdown table for each part:

- `utilisation`: the pass against matrix products of the same shapes, for rows that are all different and for groups
  that share their prompt, with and without `backend.share_prefixes`.
- `lengths`: rows of very different lengths, packed, against the same rows padded to the longest through transformers.
- `logits`: `backend.logits_chunk` at its default against all logits together, in seconds and memory.
- `memory`: peak memory for rows of several lengths, at the same number of tokens per micro-batch.

The work of a pass is what the model needs for the batch: work that is done twice, or for padding, counts once or not at
all. A token that rows share with all that precedes it (a node in the trie of the rows) counts once:

    layers     6 x parameters of the linear layers x distinct tokens
    head       6 x parameters of the output head x trained tokens
    attention  12 x layers x heads x head dim x pairs of a distinct token and one that it sees

6 is 2 for multiply and add, times 3 for forward and both halves of backward. The roof is the seconds that this work
takes at the measured speed of `roof.py`, layers and attention at that of the layers; it is measured again right before
each pass. Compared passes alternate. Shown are medians, with the lowest and the highest. `--quick` uses the bundled
model, few rounds and short rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from _arguments import parsed
from _tables import print_table, spread
from roof import layer_shapes, matmul_gflops
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig

from headrace.algorithms.batching import pack
from headrace.backends.local.backend import LocalBackend
from headrace.config import AlgorithmSection
from headrace.config.loading import build_config
from headrace.data.sample import Sample, TrainBatch
from headrace.errors import HeadraceError
from headrace.models.catalog import resolve_model
from headrace.models.modules import trained_parameters
from headrace.utils.memory import peak_mb, reset_peak
from headrace.weights.digest import weight_digest

IMITATE = AlgorithmSection(loss="cross_entropy")
PARTS = ("utilisation", "lengths", "logits", "memory")
ROWS, PROMPT, REPLY, GROUP = 32, 60, 64, 8
LENGTHS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all parts have in common."""

    model: str
    threads: int
    rounds: int
    quick: bool

    def config(self, **backend: Any) -> dict[str, Any]:
        """A run with these settings of its `backend`."""
        return {"model": {"name": self.model}, "backend": {"threads": self.threads, **backend}}


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations that a batch needs."""

    layers: float
    head: float
    attention: float
    tokens: int
    trained: int

    @property
    def total(self) -> float:
        return self.layers + self.head + self.attention

    def roof_s(self, config: Any, chunk: int, repeats: int) -> float:
        """Seconds of this work if it were matrix products alone, as fast as they are now."""
        layers = matmul_gflops(self.tokens, layer_shapes(config), repeats)
        head = matmul_gflops(min(self.trained, chunk), [(config.vocab_size, config.hidden_size)], repeats)
        return ((self.layers + self.attention) / layers + self.head / head) / 1e9


def distinct_tokens(rows: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Nodes in the trie of the rows, and pairs of a node and one on its way to the root, itself included."""
    nodes = pairs = 0
    previous: Sequence[int] = ()
    for row in sorted(map(tuple, rows)):  # so that each row shares the most with the one before it
        shared = 0
        while shared < min(len(row), len(previous)) and row[shared] == previous[shared]:
            shared += 1
        nodes += len(row) - shared
        pairs += sum(range(shared + 1, len(row) + 1))
        previous = row
    return nodes, pairs


def work_of(batch: TrainBatch, config: Any) -> Work:
    """By the formula at the top of this file."""
    nodes, pairs = distinct_tokens([sample.tokens[:-1] for sample in batch.samples])  # the last is a target only
    trained = sum(sample.trained_tokens for sample in batch.samples)
    per_layer = sum(outputs * inputs for outputs, inputs in layer_shapes(config))
    queries = layer_shapes(config)[1][1]  # heads x head dim
    depth = int(config.num_hidden_layers)
    return Work(
        layers=6.0 * depth * per_layer * nodes,
        head=6.0 * config.vocab_size * config.hidden_size * trained,
        attention=12.0 * depth * queries * pairs,
        tokens=nodes,
        trained=trained,
    )


def new_sample(prompt: Sequence[int], reply: Sequence[int]) -> Sample:
    """A row whose reply is trained."""
    mask = (0,) * (len(prompt) - 1) + (1,) * len(reply)
    zeros = (0.0,) * len(mask)
    return Sample((*prompt, *reply), mask, zeros, (0,) * len(mask), zeros)


def random_ids(count: int, vocabulary: int, chance: random.Random) -> list[int]:
    return [chance.randrange(vocabulary) for _ in range(count)]


def new_batch(vocabulary: int, rows: int, group: int, prompt: int, reply: int, budget: int = 8192) -> TrainBatch:
    """Random rows; each `group` of them has one prompt."""
    chance = random.Random(0)
    prompts = [random_ids(prompt, vocabulary, chance) for _ in range(rows // group)]
    samples = [new_sample(prompts[i // group], random_ids(reply, vocabulary, chance)) for i in range(rows)]
    return pack(samples, IMITATE, budget)


@asynccontextmanager
async def open_backend(settings: dict[str, Any]) -> AsyncIterator[LocalBackend]:
    """A learner, closed at the end."""
    backend = LocalBackend(build_config(settings))
    try:
        yield backend
    finally:
        await backend.close()


async def timed_pass(backend: LocalBackend, batch: TrainBatch) -> float:
    """Seconds of one pass; then the gradients are cleared, as after an optimizer step."""
    began = time.perf_counter()
    await backend.forward_backward(batch, IMITATE)
    seconds = time.perf_counter() - began
    backend.learner.optimizer.zero_grad()
    return seconds


async def take_turns(calls: Mapping[str, Callable[[], Awaitable[float]]], rounds: int) -> dict[str, list[float]]:
    """What each call returned in each round; the first of all rounds warms up and is left out."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            value = await call()
            if number:
                found[name].append(value)
    return found


# ---- parts ----------------------------------------------------------------------------------------------------------


async def utilisation(setup: Setup) -> dict[str, Any]:
    """The pass against matrix products of the same shapes."""
    chunk = build_config(setup.config()).backend.logits_chunk
    shared, unshared = f"groups of {GROUP}, shared", f"groups of {GROUP}, not shared"
    async with (
        open_backend(setup.config(share_prefixes=True)) as sharing,
        open_backend(setup.config(share_prefixes=False)) as plain,
    ):
        config = sharing.learner.hf_model.config
        different, grouped = (new_batch(config.vocab_size, ROWS, group, PROMPT, REPLY) for group in (1, GROUP))
        cases = {"all different": (sharing, different), shared: (sharing, grouped), unshared: (plain, grouped)}
        works = {name: work_of(batch, config) for name, (_, batch) in cases.items()}
        roofs: dict[str, list[float]] = {name: [] for name in cases}

        async def measure(name: str) -> float:
            roofs[name].append(works[name].roof_s(config, chunk, repeats=2))
            return await timed_pass(*cases[name])

        seconds = await take_turns({name: partial(measure, name) for name in cases}, setup.rounds)
    found = {name: _utilised(works[name], seconds[name], roofs[name][1:]) for name in cases}  # 1: after warming up
    _print_utilised(found)
    ratios = [slow / fast for slow, fast in zip(seconds[unshared], seconds[shared], strict=True)]
    print(f"\nsharing prefixes: {spread(ratios)} times as fast")
    return {"cases": found, "sharing_ratio": ratios}


def _utilised(work: Work, seconds: list[float], roof_s: list[float]) -> dict[str, Any]:
    tokens = ROWS * (PROMPT + REPLY - 1)
    return {
        "row_tokens": tokens,
        "work": asdict(work),
        "seconds": seconds,
        "roof_s": roof_s,
        "gflops": work.total / median(seconds) / 1e9,
        "roof_gflops": work.total / median(roof_s) / 1e9,
        "of_roof": [best / taken for best, taken in zip(roof_s, seconds, strict=True)],
        "row_tokens_per_s": tokens / median(seconds),
    }


def _print_utilised(found: dict[str, dict[str, Any]]) -> None:
    print_table(
        ["batch", "row tokens", "distinct", "seconds", "GFLOP/s", "roof GFLOP/s", "of the roof", "row tokens/s"],
        [
            [
                name,
                str(row["row_tokens"]),
                str(row["work"]["tokens"]),
                spread(row["seconds"]),
                f"{row['gflops']:.1f}",
                f"{row['roof_gflops']:.1f}",
                spread(row["of_roof"]),
                f"{row['row_tokens_per_s']:.0f}",
            ]
            for name, row in found.items()
        ],
    )


async def lengths(setup: Setup) -> dict[str, Any]:
    """Packed against padded."""
    rows, longest = (6, 128) if setup.quick else (8, 512)
    sizes = [round(16 * (longest / 16) ** (i / (rows - 1))) for i in range(rows)]
    async with open_backend(setup.config()) as backend:
        vocabulary, chance = backend.learner.hf_model.config.vocab_size, random.Random(0)
        samples = [
            new_sample(random_ids(8, vocabulary, chance), random_ids(size - 8, vocabulary, chance)) for size in sizes
        ]
        batch = pack(samples, IMITATE, 8192)
        trained = await backend.forward_backward(batch, IMITATE)
        expected = -sum(sum(row) for row in trained.logprobs)
        padded = PaddedPass(backend.learner.hf_model, samples)
        names = ("packed", "padded, head on trained tokens", "padded, head on all")
        seconds = await take_turns(
            {
                names[0]: lambda: timed_pass(backend, batch),
                names[1]: lambda: padded.timed(expected, head_on_all=False),
                names[2]: lambda: padded.timed(expected, head_on_all=True),
            },
            setup.rounds,
        )
    ratios = {
        name: [other / ours for other, ours in zip(seconds[name], seconds[names[0]], strict=True)] for name in names
    }
    print_table(
        ["pass", "tokens", "seconds", "times packed"],
        [
            [name, str(sum(sizes) if name == names[0] else rows * longest), spread(seconds[name]), spread(ratios[name])]
            for name in names
        ],
    )
    return {"lengths": sizes, "seconds": seconds, "ratio": ratios}


class PaddedPass:
    """The same rows as most programs run them: right-padded, through the forward of transformers."""

    def __init__(self, hf_model: Any, samples: Sequence[Sample]) -> None:
        self._hf_model = hf_model
        inputs = [torch.tensor(sample.tokens[:-1]) for sample in samples]
        self._ids = pad_sequence(inputs, batch_first=True)
        ones = [torch.ones(len(row), dtype=torch.long) for row in inputs]
        self._mask = pad_sequence(ones, batch_first=True)
        masks = [torch.tensor(sample.loss_mask, dtype=torch.bool) for sample in samples]
        self._trained = pad_sequence(masks, batch_first=True)
        targets = [torch.tensor(sample.tokens[1:]) for sample in samples]
        self._targets = pad_sequence(targets, batch_first=True)[self._trained]

    async def timed(self, expected: float, head_on_all: bool) -> float:
        """Seconds of a pass, whose loss must be the expected one: else it would not be the same work."""
        began = time.perf_counter()
        keep = {"input_ids": self._ids, "attention_mask": self._mask, "use_cache": False}
        if head_on_all:
            logits = self._hf_model(**keep).logits[self._trained]
        else:
            logits = self._hf_model.lm_head(self._hf_model.model(**keep).last_hidden_state[self._trained])
        loss = F.cross_entropy(logits, self._targets, reduction="sum")
        loss.backward()
        seconds = time.perf_counter() - began
        self._hf_model.zero_grad()
        if abs(loss.item() - expected) > 1e-3 * expected:
            sys.exit(f"the padded pass has loss {loss.item():.3f}, the packed one {expected:.3f}; they must agree")
        return seconds


async def logits(setup: Setup) -> dict[str, Any]:
    """Logits of a chunk of positions at a time, against all together."""
    default = build_config(setup.config()).backend.logits_chunk
    chunks = {"in chunks": default, "all together": max(ROWS * REPLY, default)}
    async with (
        open_backend(setup.config(logits_chunk=chunks["in chunks"])) as chunked,
        open_backend(setup.config(logits_chunk=chunks["all together"])) as together,
    ):
        batch = new_batch(chunked.learner.hf_model.config.vocab_size, ROWS, 1, PROMPT, REPLY)
        seconds = await take_turns(
            {"in chunks": lambda: timed_pass(chunked, batch), "all together": lambda: timed_pass(together, batch)},
            setup.rounds,
        )
    grown = {
        name: in_fresh_process(setup.config(logits_chunk=chunk), ROWS, PROMPT, REPLY) for name, chunk in chunks.items()
    }
    print_table(
        ["logits", "positions per chunk", "seconds", "memory grows by (MB)"],
        [[name, str(chunk), spread(seconds[name]), f"{grown[name]:.0f}"] for name, chunk in chunks.items()],
    )
    ratios = [one / two for one, two in zip(seconds["in chunks"], seconds["all together"], strict=True)]
    print(
        f"\nin chunks: {spread(ratios)} times the seconds, "
        f"{grown['in chunks'] / grown['all together']:.2f} times the memory"
    )
    return {"chunks": chunks, "seconds": seconds, "ratio": ratios, "grown_mb": grown}


async def memory(setup: Setup) -> dict[str, Any]:
    """How far memory grows by the length of rows."""
    budget, asked = (1024, (128, 1024)) if setup.quick else (4096, LENGTHS)
    limit = AutoConfig.from_pretrained(resolve_model(setup.model)).max_position_embeddings
    found: dict[int, dict[str, float]] = {}
    for length in (length for length in asked if length <= limit):
        shape = (budget // length, length // 2, length - length // 2)
        plain, recomputed = (
            in_fresh_process(setup.config(gradient_checkpointing=on, micro_batch_tokens=budget), *shape)
            for on in (False, True)
        )
        found[length] = {"plain_mb": plain, "checkpointing_mb": recomputed, "ratio": recomputed / plain}
    print_table(
        ["row length", "memory grows by (MB)", "with gradient checkpointing (MB)", "ratio"],
        [
            [str(length), f"{row['plain_mb']:.0f}", f"{row['checkpointing_mb']:.0f}", f"{row['ratio']:.2f}"]
            for length, row in found.items()
        ],
    )
    print(f"\n{budget} tokens per micro-batch. Gradients, as large as the weights, are part of the growth.")
    return {"tokens": budget, "grown": found}


def in_fresh_process(settings: dict[str, Any], rows: int, prompt: int, reply: int) -> float:
    """Megabytes by which memory grows, with nothing left over from what was measured before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_growth_mb, settings, rows, prompt, reply).result()


def _growth_mb(settings: dict[str, Any], rows: int, prompt: int, reply: int) -> float:
    config = build_config(settings)
    backend = LocalBackend(config)
    vocabulary = backend.learner.hf_model.config.vocab_size
    batch = new_batch(vocabulary, rows, 1, prompt, reply, config.backend.micro_batch_tokens)
    weight_digest(
        trained_parameters(backend.learner.hf_model)
    )  # reads every weight: some may have been in the file only
    reset_peak()
    before = peak_mb()
    asyncio.run(timed_pass(backend, batch))
    return peak_mb() - before


# ---------------------------------------------------------------------------------------------------------------------


async def run(setup: Setup, parts: Sequence[str]) -> dict[str, Any]:
    known = {"utilisation": utilisation, "lengths": lengths, "logits": logits, "memory": memory}
    return {part: await known[part](setup) for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parsed(parser, {"model": "bundled", "rounds": 2})
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; known: {', '.join(PARTS)}")
    setup = Setup(given.model, given.threads, given.rounds, given.quick)
    torch.set_num_threads(setup.threads)
    try:
        found = asyncio.run(run(setup, given.parts or PARTS))
    except HeadraceError as error:
        sys.exit(f"error: {error}")
    if given.json:
        given.json.write_text(json.dumps({**asdict(setup), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
