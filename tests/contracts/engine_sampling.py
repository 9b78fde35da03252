"""What every rollout engine must do with one request: what comes back, which random numbers, where it ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contracts.engine_harness import EngineHarness, Start, assert_fits, sampling_logprobs, soon
from headrace.engines.base import SamplingParams
from headrace.errors import DataError, PromptTooLongError


class SamplingContract(EngineHarness):
    """The part of `EngineContract` that is about single requests."""

    # ---- what comes back ------------------------------------------------------------------------------------------

    async def test_a_generation_has_one_entry_per_token(self, start: Start) -> None:
        prompt = self.prompt(5)
        made = await soon(start().generate(prompt, SamplingParams(max_tokens=9), 1))
        assert made.prompt_ids == tuple(prompt)
        assert len(made.completion_ids) == len(made.logprobs) == len(made.model_logprobs) == len(made.versions) == 9
        assert all(type(token) is int and 0 <= token < self.vocabulary for token in made.completion_ids)
        assert made.versions == (0,) * 9
        assert made.temperature == 1.0

    @pytest.mark.parametrize("length", [1, 2, 17])
    async def test_logprobs_are_those_of_the_model(self, start: Start, length: int) -> None:
        made = await soon(start().generate(self.prompt(length), SamplingParams(max_tokens=30), 3))
        self.assert_logprobs(made)
        assert made.logprobs == made.model_logprobs  # nothing is scaled or cut

    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p"),
        [(0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 20, 0.8), (1.0, 10_000, 1.0), (0.7, 1, 1.0)],
    )
    async def test_logprobs_are_those_of_the_sampling_distribution(
        self, start: Start, temperature: float, top_k: int, top_p: float
    ) -> None:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=30)
        made = await soon(start().generate(self.prompt(6), params, 7))
        self.assert_logprobs(made, temperature, top_k, top_p)
        assert made.temperature == temperature

    async def test_requests_of_one_batch_keep_their_own_parameters(self, start: Start) -> None:
        settings = [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 4, 1.0), (1.5, 0, 0.6), (1.0, 0, 1.0)]
        engine = start()
        made = await soon(
            asyncio.gather(
                *(
                    engine.generate(
                        self.prompt(8, i), SamplingParams(temperature=t, top_k=k, top_p=p, max_tokens=12), seed=i
                    )
                    for i, (t, k, p) in enumerate(settings)
                )
            )
        )
        for generation, (temperature, top_k, top_p) in zip(made, settings, strict=True):
            self.assert_logprobs(generation, temperature, top_k, top_p)

    async def test_greedy_takes_the_likeliest_with_certainty(self, start: Start) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        made = await soon(start().generate(self.prompt(4), params, 1))
        model_TV = self.expected(made)
        assert list(made.completion_ids) == model_TV.argmax(-1).tolist()
        assert made.logprobs == (0.0,) * 20
        np.testing.assert_allclose(made.model_logprobs, model_TV.max(-1), atol=self.tolerance, rtol=0)
        assert made.temperature == 0.0

    @pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 30, 0.9)])
    async def test_tokens_follow_the_distribution(
        self, start: Start, temperature: float, top_k: int, top_p: float
    ) -> None:
        engine, prompt = start(), self.prompt(3)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=1)
        made = await soon(asyncio.gather(*(engine.generate(prompt, params, seed) for seed in range(self.draws))))
        counts = np.bincount([g.completion_ids[0] for g in made], minlength=self.vocabulary)
        table_TV = sampling_logprobs(self.reference_logprobs(prompt), temperature, top_k, top_p)
        assert_fits(counts, np.exp(table_TV[-1]))

    # ---- random numbers -------------------------------------------------------------------------------------------

    async def test_the_same_seed_gives_the_same_tokens(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=30)
        one = await soon(engine.generate(self.prompt(6), params, 11))
        two = await soon(engine.generate(self.prompt(6), params, 11))
        assert one == two
        assert one == await soon(start().generate(self.prompt(6), params, 11))

    async def test_different_seeds_give_different_tokens(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=30)
        made = await soon(asyncio.gather(*(engine.generate(self.prompt(6), params, seed) for seed in range(20))))
        assert len({g.completion_ids for g in made}) == 20

    @pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70])
    async def test_any_integer_is_a_seed(self, start: Start, seed: int) -> None:
        assert (
            len((await soon(start().generate(self.prompt(4), SamplingParams(max_tokens=3), seed))).completion_ids) == 3
        )

    async def test_a_shorter_request_is_the_beginning_of_a_longer_one(self, start: Start) -> None:
        engine = start()
        short = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=7), 5))
        long = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=30), 5))
        self.assert_same(short, long, tokens=7)

    async def test_a_crowd_does_not_change_a_request(self, start: Start) -> None:
        engine = start()
        alone = [await soon(engine.generate(self.prompt(n, 9), SamplingParams(max_tokens=70), n)) for n in (1, 5, 19)]
        crowded = asyncio.gather(
            *(engine.generate(self.prompt(n, 9), SamplingParams(max_tokens=70), n) for n in (1, 5, 19))
        )
        await self.crowd(engine, self.others)
        for one, other in zip(alone, await soon(crowded), strict=True):
            self.assert_same(one, other)

    async def test_a_group_with_one_prompt_gives_what_each_gives_alone(self, start: Start) -> None:
        engine, params = start(), SamplingParams(max_tokens=20)
        group = await soon(asyncio.gather(*(engine.generate(self.prompt(12), params, seed) for seed in range(6))))
        for seed, generation in enumerate(group):
            self.assert_same(generation, await soon(engine.generate(self.prompt(12), params, seed)))

    # ---- where it ends --------------------------------------------------------------------------------------------

    async def test_max_tokens_of_the_call_wins_over_the_default(self, start: Start) -> None:
        engine = start(defaults=SamplingParams(max_tokens=5, temperature=0.5))
        made = await soon(engine.generate(self.prompt(4), SamplingParams(), 1))
        assert (len(made.completion_ids), made.finish_reason, made.temperature) == (5, "length", 0.5)
        made = await soon(engine.generate(self.prompt(4), SamplingParams(max_tokens=8), 1))
        assert (len(made.completion_ids), made.finish_reason) == (8, "length")

    async def test_parameters_of_the_caller_are_not_changed(self, start: Start) -> None:
        params, prompt = SamplingParams(stop_token_ids=(3,), max_tokens=2), self.prompt(4)
        kept_params, kept_prompt = replace(params), list(prompt)
        await soon(start(eos_ids=(4,)).generate(prompt, params, 1))
        assert params == kept_params and params.temperature is None
        assert prompt == kept_prompt

    async def test_the_model_length_ends_a_request_and_says_so(self, start: Start) -> None:
        engine = start(max_model_length=24)
        made = await soon(engine.generate(self.prompt(20), SamplingParams(max_tokens=50), 1))
        assert (len(made.completion_ids), made.finish_reason) == (4, "model_length")
        made = await soon(engine.generate(self.prompt(20), SamplingParams(max_tokens=4), 1))
        assert (len(made.completion_ids), made.finish_reason) == (4, "length")
        made = await soon(engine.generate(self.prompt(23), SamplingParams(max_tokens=50), 1))
        assert (len(made.completion_ids), made.finish_reason) == (1, "model_length")
        self.assert_logprobs(made)

    @pytest.mark.parametrize("length", [24, 60])
    async def test_a_prompt_without_room_is_refused(self, start: Start, length: int) -> None:
        with pytest.raises(PromptTooLongError, match=rf"{length} tokens.*max_model_length 24"):
            await soon(start(max_model_length=24).generate(self.prompt(length), SamplingParams(), 1))

    async def test_an_empty_prompt_is_refused(self, start: Start) -> None:
        with pytest.raises(DataError, match="at least one token"):
            await soon(start().generate([], SamplingParams(), 1))

    async def test_an_unreadable_prompt_fails_alone(self, start: Start) -> None:
        engine = start()
        neighbour = asyncio.ensure_future(engine.generate(self.prompt(5), SamplingParams(max_tokens=self.long), 1))
        odd: list[Any] = [self.vocabulary, -1, 1.5, "token"]
        for token in odd:
            with pytest.raises(DataError, match="not a token id"):
                await soon(engine.generate([3, token, 4], SamplingParams(), 1))
        assert len((await soon(neighbour)).completion_ids) == self.long

    async def test_a_stop_token_ends_a_request_and_is_kept(self, start: Start) -> None:
        engine = start()
        free = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40), 21))
        stop = free.completion_ids[17]
        end = free.completion_ids.index(stop) + 1
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40, stop_token_ids=(stop,)), 21))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids[:end], "stop")

    async def test_the_end_of_sequence_stops_unless_ignored(self, start: Start) -> None:
        free = await soon(start().generate(self.prompt(6), SamplingParams(max_tokens=40), 21))
        eos, other = free.completion_ids[17], free.completion_ids[30]
        end = free.completion_ids.index(eos) + 1
        engine = start(eos_ids=(eos,))
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40), 21))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids[:end], "stop")
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=40, ignore_eos=True), 21))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids, "length")
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(other,))
        made = await soon(engine.generate(self.prompt(6), params, 21))
        assert made.completion_ids == free.completion_ids[: free.completion_ids.index(other) + 1]

    async def test_a_token_that_is_both_last_and_stop_counts_as_stop(self, start: Start) -> None:
        free = await soon(start().generate(self.prompt(6), SamplingParams(max_tokens=1), 21))
        engine = start(eos_ids=free.completion_ids)
        made = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=1), 21))
        assert made.finish_reason == "stop"

    async def test_a_stop_string_may_span_tokens(self, start: Start) -> None:
        engine = start()
        free = await soon(engine.generate(self.prompt(6), SamplingParams(max_tokens=60), 22))
        text = self.detokenize(free.completion_ids[20:24])
        stop = text[1:-1]
        assert stop not in self.detokenize(free.completion_ids[:23])
        params = SamplingParams(max_tokens=60, stop=("never this", stop))
        made = await soon(engine.generate(self.prompt(6), params, 22))
        assert (made.completion_ids, made.finish_reason) == (free.completion_ids[:24], "stop")

    async def test_stop_strings_are_not_searched_in_the_prompt(self, start: Start) -> None:
        prompt = self.prompt(6)
        params = SamplingParams(max_tokens=5, temperature=0.0, stop=(self.detokenize(prompt),))
        made = await soon(start().generate(prompt, params, 1))
        assert (len(made.completion_ids), made.finish_reason) == (5, "length")
