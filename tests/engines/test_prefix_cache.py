"""Keys and values of ended replies, kept for the next turn of their conversations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from headrace.engines.base import Generation, SamplingParams
from headrace.engines.torch.engine import TorchEngine
from headrace.engines.torch.prefix_cache import KeptCaches
from headrace.models.causal import build_causal_model

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)


class Prefills:
    """Counts the tokens that a model prefills."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        prefill = model.prefill

        def counted(cache: Any, rows: Any, slots: Sequence[int], begin: Sequence[int] | None = None) -> None:
            self.tokens += len(rows.ids_N)
            prefill(cache, rows, slots, begin)

        model.prefill = counted


async def talk(family: str, kept: int, sync_after: int = -1, row_block: int = 0) -> tuple[list[Generation], int]:
    """Four conversations of five turns each, in step; what was sampled, and how many tokens were prefilled."""
    torch.set_num_threads(1)
    model = build_causal_model(tiny.tiny_model(family))
    model.row_block = row_block
    counted = Prefills(model)
    engine = TorchEngine(model, kept_tokens=kept)
    rng = random.Random(3)
    talks = [[rng.randrange(3, 97) for _ in range(12)] for _ in range(4)]
    made: list[Generation] = []
    for turn in range(5):
        replies = await asyncio.gather(*(engine.generate(t, PARAMS, 10 * turn + i) for i, t in enumerate(talks)))
        for one, reply in zip(talks, replies, strict=True):
            one += [*reply.completion_ids, *(rng.randrange(3, 97) for _ in range(4))]
        made += replies
        if turn == sync_after:
            await engine.pause()
            await engine.begin_update(1)
            await engine.end_update(1)
            await engine.resume()
    await engine.close()
    return made, counted.tokens


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_a_next_turn_computes_only_what_is_new(family: str) -> None:
    plain, all_tokens = await talk(family, 0)
    kept, few_tokens = await talk(family, 4096)
    assert [one.completion_ids for one in kept] == [one.completion_ids for one in plain]
    for one, two in zip(kept, plain, strict=True):
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
    # per conversation: the first two turns whole (nothing is kept before the first was seen to go on), then the last
    # token of the reply and what was said to it, of which one is left to the first step of decoding
    assert few_tokens == 4 * (11 + 24 + 3 * 4)
    assert all_tokens == 4 * (11 + 24 + 37 + 50 + 63)


async def test_new_weights_make_an_end_of_what_is_kept() -> None:
    _, whole = await talk("llama", 4096)
    _, after_publication = await talk("llama", 4096, sync_after=2)
    assert after_publication == whole - 4 * 4 + 4 * 50


async def test_nothing_is_kept_where_results_must_not_depend_on_it() -> None:
    assert (await talk("llama", 4096, row_block=8)) == (await talk("llama", 0, row_block=8))


def test_the_least_recently_used_is_let_go_first() -> None:
    kept = KeptCaches(10)
    assert not kept.ended((1, 2, 3))
    assert kept.beginning_of((1, 2, 3, 4)) == (0, None)  # from now on there is something to keep
    assert kept.ended((1, 2, 3))
    kept.keep((1, 2, 3), "a")
    kept.keep((1, 2, 3, 4, 5), "b")
    assert kept.beginning_of((1, 2, 3, 9)) == (3, "a")
    kept.keep((7, 8, 9), "c")
    assert kept.beginning_of((1, 2, 3, 4, 5, 6)) == (3, "a"), "b had not been used for longer"
    kept.keep((7, 8, 9), "d")
    assert kept.beginning_of((7, 8, 9)) == (3, "d")
    assert not kept.ended(tuple(range(11))), "longer than all that may be kept"
    kept.forget()
    assert kept.beginning_of((7, 8, 9)) == (0, None)
