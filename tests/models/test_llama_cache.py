"""Slots that begin alike keep that once; whoever leaves, everyone reads what was written."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

import tiny
from headrace.engines.base import SamplingParams
from headrace.engines.torch.engine import TorchEngine
from headrace.models.causal import build_causal_model
from headrace.models.kernels import cpu as native
from headrace.models.llama import LlamaModel
from headrace.models.llama_cache import LlamaCache


class Played:
    """A cache, and what it should hold: each sequence is a list of numbers that stand at its positions."""

    def __init__(self, shares: bool) -> None:
        self.cache = LlamaCache(2, 1, 2, torch.zeros(1), shares)
        self.held: list[list[int]] = []
        self._next = 0

    def join(self, length: int) -> None:
        self._slot()
        self.held.append([])
        for _ in range(length):
            self.write(len(self.held) - 1)

    def join_as(self, source: int, length: int) -> None:
        self._slot()
        self.held.append(self.held[source][:length])
        self.cache.share(source, len(self.held) - 1, length)

    def write(self, slot: int) -> None:
        self._next += 1
        at = len(self.held[slot])
        self.cache.ensure(len(self.held), at + 1)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor[slot, :, at] = self._next
        self.held[slot].append(self._next)

    def leave(self, slots: set[int]) -> None:
        self.cache.free(slots)
        for slot in sorted(slots, reverse=True):
            last = len(self.held) - 1
            if slot != last:
                self.cache.move(last, slot, len(self.held[last]))
                self.held[slot] = self.held[last]
            self.held.pop()

    def check(self) -> None:
        for slot, numbers in enumerate(self.held):
            for length in {len(numbers), len(numbers) // 2}:
                for tensor in self.cache.take(slot, length):
                    assert tensor[0, :, 0].tolist() == numbers[:length]
        for slot in range(len(self.held)):  # as the kernel wants it
            stem, length = int(self.cache.stem_slots[slot]), int(self.cache.stem_lengths[slot])
            assert not length or (stem < len(self.held) and not self.cache.stem_lengths[stem])

    def _slot(self) -> None:
        self.cache.ensure(len(self.held) + 1, 1)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_everyone_reads_what_was_written(seed: int, shares: bool) -> None:
    rng = random.Random(seed)
    played = Played(shares)
    for _ in range(120):
        count = len(played.held)
        what = rng.choice(["join", "as", "as", "write", "write", "write", "leave"]) if count else "join"
        if what == "join" and count < 40:
            played.join(rng.randrange(1, 6))
        elif what == "as" and count < 40:
            source = rng.randrange(count)
            played.join_as(source, rng.randint(1, len(played.held[source])))
        elif what == "leave":
            played.leave(set(rng.sample(range(count), rng.randint(1, min(3, count)))))
        elif count:
            played.write(rng.randrange(count))
        played.check()
    played.cache.release()
    assert played.cache.length == 0 and not len(played.cache.stem_slots)


@pytest.mark.skipif(native.kernels() is None, reason="no native kernels on this machine")
async def test_a_group_that_ends_at_different_times_is_what_each_is_alone() -> None:
    hf_model = tiny.tiny_model("qwen3", torch.float32)
    model = build_causal_model(hf_model)
    assert isinstance(model, LlamaModel) and model.new_cache()._shares
    engine = TorchEngine(model, max_batch=6)
    prompts = [prompt for prompt in tiny.random_rows(40, 25) for _ in range(6)]
    asked = [(prompt, SamplingParams(max_tokens=3 + 5 * (i % 4)), i) for i, prompt in enumerate(prompts)]
    alone = [await engine.generate(*one) for one in asked]
    together = await asyncio.gather(*(engine.generate(*one) for one in asked))
    for got, want in zip(together, alone, strict=True):
        assert got.completion_ids == want.completion_ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    await engine.close()


def test_nothing_is_shared_where_results_must_be_equal_to_the_bit() -> None:
    model = build_causal_model(tiny.tiny_model("llama", torch.float32))
    model.row_block = 32
    assert isinstance(model, LlamaModel) and not model.new_cache()._shares
