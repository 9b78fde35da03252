"""What every training backend must do. Subclass `BackendContract`, supply `make_backend`, and pass all of it."""

from __future__ import annotations

import asyncio
import math
import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.base import Backend, Scorer, Snapshots, Trained
from headrace.backends.setup import Policy, attach_engine, choose
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.sample import ClipState, Sample
from headrace.engines.base import SamplingParams
from headrace.errors import BackendError, DivergedError, WeightSyncError

REINFORCE_LIKE = AlgorithmSection(loss="ppo_clip", clip_low=10.0, clip_high=10.0)
IMITATE = AlgorithmSection(loss="cross_entropy")
LOSSES = ["importance_sampling", "reinforce", "cispo", "gspo", "dppo_tv", "dppo_kl", "cross_entropy"]
AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum", "constant"]


def random_samples(count: int, vocabulary: int, seed: int = 0, longest: int = 24) -> list[Sample]:
    """Rows of different lengths with prompts, several trained stretches and advantages of both signs."""
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        length = rng.randint(4, longest)
        mask = [0, *(int(rng.random() < 0.6) for _ in range(length - 3)), 1]
        samples.append(
            Sample(
                tokens=tuple(rng.randrange(vocabulary) for _ in range(length)),
                loss_mask=tuple(mask),
                logprobs=tuple(-rng.random() * 5 for _ in mask),
                versions=tuple(0 for _ in mask),
                advantages=tuple(rng.uniform(-1, 1) for _ in mask),
                task_id=str(index),
            )
        )
    return samples


class BackendContract:
    """One suite for all backends. `tolerance` is what two routes to the same number may differ by."""

    tolerance = 1e-5

    settings: ClassVar[dict[str, Any]] = {}
    """Sections of the run configuration."""

    @abstractmethod
    def make_backend(self, config: RunConfig) -> Backend:
        """A fresh backend, on the same small model each time."""

    def new_backend(self, **changes: Any) -> Backend:
        """A backend; `changes` are `section=dict` of a run configuration."""
        return self.make_backend(build_config({**self.settings, **changes}))

    def connect(self, backend: Backend) -> Policy:
        """Give a backend of the class's settings the engine that they name."""
        config = build_config(dict(self.settings))
        return attach_engine(config, backend, choose(config))

    def samples(self, backend: Backend, count: int = 8, seed: int = 0) -> list[Sample]:
        return random_samples(count, min(90, len(backend.tokenizer)), seed)

    async def logprobs(self, backend: Backend, samples: list[Sample], of: Scorer = "policy") -> list[float]:
        found = await backend.compute_logprobs(pack(samples, IMITATE, 64), of)
        return [value for row in found for value in row]

    async def train(
        self, backend: Backend, samples: list[Sample], algorithm: AlgorithmSection, cuts: int = 1, tokens: int = 512
    ) -> list[Trained]:
        size = -(-len(samples) // cuts)
        batches = [pack(samples[i : i + size], algorithm, tokens) for i in range(0, len(samples), size)]
        found = [await backend.forward_backward(batch, algorithm) for batch in batches]
        counted = [replace(batch, rejected=one.rejected) for batch, one in zip(batches, found, strict=True)]
        await backend.optim_step(1e-3, grad_scale(counted, algorithm))
        return found

    # ---- forward_backward -----------------------------------------------------------------------------------------

    async def test_training_raises_what_has_positive_advantage(self) -> None:
        backend = self.new_backend()
        samples = self.samples(backend)
        before = await self.logprobs(backend, samples)
        for _ in range(5):
            await self.train(backend, samples, IMITATE)
        after = await self.logprobs(backend, samples)
        trained = [m for s in samples for m in s.loss_mask]
        gain = [a - b for a, b, m in zip(after, before, trained, strict=True) if m]
        assert sum(gain) / len(gain) > 0
        await backend.close()

    async def test_nothing_changes_without_optim_step(self) -> None:
        backend = self.new_backend()
        samples = self.samples(backend)
        before = await self.logprobs(backend, samples)
        await backend.forward_backward(pack(samples, IMITATE, 512), IMITATE)
        assert await self.logprobs(backend, samples) == before
        await backend.close()

    async def test_the_log_probability_of_every_trained_target_is_found(self) -> None:
        backend = self.new_backend()
        samples = [replace(s, temperature=heat) for s, heat in zip(self.samples(backend), (1.0, 0.7) * 4, strict=True)]
        batch = pack(samples, REINFORCE_LIKE, 30)
        assert len(batch.micro_batches) > 2
        scored = await backend.compute_logprobs(batch)
        found = await backend.forward_backward(batch, REINFORCE_LIKE)
        assert [len(row) for row in scored] == [len(sample.tokens) - 1 for sample in samples]
        assert [len(row) for row in found.logprobs] == [sample.trained_tokens for sample in samples]
        for sample, trained, row in zip(samples, found.logprobs, scored, strict=True):
            expected = [value for value, kept in zip(row, sample.loss_mask, strict=True) if kept]
            assert list(trained) == pytest.approx(expected, rel=self.tolerance, abs=self.tolerance)
        assert found.metrics.reduce()["tokens/trained"] == sum(sample.trained_tokens for sample in samples)
        await backend.close()

    async def test_entropy_and_clip_state_are_those_of_every_trained_target(self) -> None:
        backend = self.new_backend()
        samples = self.samples(backend)  # what they say they were sampled with is far from what the model gives
        algorithm = AlgorithmSection(loss="ppo_clip", clip_low=0.2, clip_high=0.2)
        found = await backend.forward_backward(pack(samples, algorithm, 30), algorithm)
        reported = found.metrics.reduce()
        counts = [sample.trained_tokens for sample in samples]
        assert [len(row) for row in found.clip_states] == counts
        for sample, logprobs, states in zip(samples, found.logprobs, found.clip_states, strict=True):
            given = compress(zip(sample.logprobs, sample.advantages, strict=True), sample.loss_mask)
            for (old, advantage), new, state in zip(given, logprobs, states, strict=True):
                beyond = new - old > math.log(1.2) if advantage > 0 else new - old < math.log(0.8)
                assert state == (ClipState.CLIPPED if beyond else ClipState.KEPT)
        states = [state for row in found.clip_states for state in row]
        assert {*states} == {ClipState.KEPT, ClipState.CLIPPED}
        assert reported["policy/clip_fraction"] == pytest.approx(sum(states) / len(states))
        if found.entropies:  # a service may return no more than the targets' log-probabilities
            assert [len(row) for row in found.entropies] == counts
            values = [value for row in found.entropies for value in row]
            assert reported["policy/entropy"] == pytest.approx(sum(values) / len(values), rel=1e-5)
        await backend.close()

    async def test_a_recomputed_proximal_policy_makes_every_ratio_one(self) -> None:
        backend = self.new_backend()
        algorithm = AlgorithmSection(proximal="recompute", clip_low=0.01, clip_high=0.01)
        found = await backend.forward_backward(pack(self.samples(backend), algorithm, 64), algorithm)
        assert found.metrics.reduce()["policy/clip_fraction"] == 0.0
        await backend.close()

    async def test_the_loss_of_preferences_is_reported_per_pair_and_starts_at_ln_2(self) -> None:
        backend = self.new_backend()
        samples = self.samples(backend, 6)
        scored = await backend.compute_logprobs(pack(samples, IMITATE, 512), of="reference")
        pairs = [replace(s, reference_logprobs=tuple(row)) for s, row in zip(samples, scored, strict=True)]
        algorithm = AlgorithmSection(loss="dpo", aggregation="sequence_mean_token_sum")
        found = (await backend.forward_backward(pack(pairs, algorithm, 30, together=2), algorithm)).metrics.reduce()
        assert found["dpo/loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert "policy/loss" not in found and "policy/entropy" in found
        await backend.close()

    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    async def test_result_does_not_depend_on_how_the_step_is_cut(self, aggregation: str) -> None:
        algorithm = REINFORCE_LIKE.model_copy(update={"aggregation": aggregation, "aggregation_length": 64})
        await self.require_same_result(algorithm, ((1, 10_000), (1, 30), (4, 50), (8, 1)))

    @pytest.mark.parametrize("loss", LOSSES)
    async def test_no_loss_depends_on_how_the_step_is_cut(self, loss: str) -> None:
        await self.require_same_result(AlgorithmSection(loss=loss), ((1, 10_000), (4, 50)))

    async def require_same_result(self, algorithm: AlgorithmSection, cuts: Sequence[tuple[int, int]]) -> None:
        results = []
        for parts, tokens in cuts:
            backend = self.new_backend(optimizer={"eps": 1.0, "grad_clip": 0.0})  # eps 1: an SGD-like step
            samples = self.samples(backend)
            await self.train(backend, samples, algorithm, parts, tokens)
            results.append(await self.logprobs(backend, samples))
            await backend.close()
        for other in results[1:]:
            assert other == pytest.approx(results[0], rel=self.tolerance, abs=self.tolerance)

    @pytest.mark.parametrize("name", ["sequence_mask", "veto"])
    async def test_a_rejected_sequence_is_out_of_the_step(self, name: str) -> None:
        correction = {"name": name, "floor": 1e-4} if name == "veto" else {"name": name, "low": 0.5, "high": 2.0}
        algorithm = AlgorithmSection.model_validate({"proximal": "recompute", "correction": correction})
        results = []
        for rejects in (True, False):
            backend = self.new_backend(optimizer={"eps": 1.0, "grad_clip": 0.0})
            samples = await self.on_policy(backend)
            off = {1, 4, 5}  # the sampler was sure of what the learner finds all but impossible
            given = [replace(s, logprobs=tuple(x + 40.0 for x in s.logprobs)) if i in off else s
                     for i, s in enumerate(samples)]  # fmt: skip
            kept = [sample for i, sample in enumerate(samples) if i not in off]
            (found,) = await self.train(backend, given if rejects else kept, algorithm, tokens=40)
            assert found.rejected == (off if rejects else set())
            assert found.metrics.reduce()["tokens/trained"] == sum(sample.trained_tokens for sample in kept)
            results.append(await self.logprobs(backend, samples))
            await backend.close()
        assert results[0] == pytest.approx(results[1], rel=self.tolerance, abs=self.tolerance)

    async def on_policy(self, backend: Backend) -> list[Sample]:
        """Rows whose sampler was the backend's own policy."""
        samples = self.samples(backend)
        scored = await backend.compute_logprobs(pack(samples, IMITATE, 64))
        return [replace(s, logprobs=tuple(row)) for s, row in zip(samples, scored, strict=True)]

    async def test_a_loss_that_is_not_finite_names_the_samples(self) -> None:
        backend = self.new_backend()
        good = self.samples(backend, 3)
        nothing = tuple(float("nan") for _ in good[0].advantages)
        bad = replace(good[0], advantages=nothing, task_id="the-broken-one")
        with pytest.raises(DivergedError, match="the-broken-one"):
            await backend.forward_backward(pack([*good, bad], REINFORCE_LIKE, 512), REINFORCE_LIKE)
        await backend.close()

    # ---- optim_step -----------------------------------------------------------------------------------------------

    async def test_the_gradient_is_scaled_then_clipped(self) -> None:
        norm, free = await self.one_step(grad_clip=0.0, grad_scale=0.1)
        same_norm, clipped = await self.one_step(grad_clip=norm / 2, grad_scale=0.1)
        _, halved = await self.one_step(grad_clip=0.0, grad_scale=0.05)
        assert same_norm == pytest.approx(norm)
        assert clipped == pytest.approx(halved, rel=self.tolerance, abs=self.tolerance)
        assert clipped != pytest.approx(free, rel=self.tolerance, abs=self.tolerance)

    async def one_step(self, grad_clip: float, grad_scale: float) -> tuple[float, list[float]]:
        """The norm that a step reports, and the log-probabilities after it."""
        backend = self.new_backend(optimizer={"eps": 1.0, "grad_clip": grad_clip})
        samples = self.samples(backend)
        await backend.forward_backward(pack(samples, IMITATE, 512), IMITATE)
        metrics = await backend.optim_step(1e-2, grad_scale)
        found = await self.logprobs(backend, samples)
        await backend.close()
        return metrics.reduce()["policy/grad_norm"], found

    async def test_optim_step_without_a_gradient_is_an_error(self) -> None:
        backend = self.new_backend()
        with pytest.raises(BackendError, match="no accumulated gradient"):
            await backend.optim_step(1e-3, 1.0)
        await backend.close()

    async def test_optim_step_forgets_the_gradient(self) -> None:
        once, twice = self.new_backend(), self.new_backend()
        samples = self.samples(once)
        for backend in (once, twice):
            await self.train(backend, samples, IMITATE)
        await self.train(twice, samples, IMITATE)
        await self.train(once, samples, IMITATE)
        assert await self.logprobs(once, samples) == pytest.approx(await self.logprobs(twice, samples), abs=1e-6)
        await once.close()
        await twice.close()

    # ---- the reference --------------------------------------------------------------------------------------------

    async def test_the_reference_stays_the_policy_as_the_run_began(self, tmp_path: Path) -> None:
        backend, resumed = self.new_backend(), self.new_backend()
        samples = self.samples(backend)
        before = await self.logprobs(backend, samples)
        await self.train(backend, samples, IMITATE)
        await backend.save(tmp_path / "state")
        await resumed.load(tmp_path / "state")
        assert await self.logprobs(backend, samples) != pytest.approx(before, abs=self.tolerance)
        for one in (backend, resumed):
            assert await self.logprobs(one, samples, "reference") == pytest.approx(before, abs=self.tolerance)
            await one.close()

    # ---- weight syncs -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_the_engine_samples_from_the_synced_weights(self, temperature: float) -> None:
        backend = self.new_backend()
        policy = self.connect(backend)
        engine = policy.engine
        samples = self.samples(backend)
        for _ in range(3):
            await self.train(backend, samples, IMITATE)
        assert (await policy.sync.sync(1)).version == 1
        params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
        generation = await engine.generate(samples[0].tokens[:3], params, seed=3)
        assert set(generation.versions) == {1}
        row = Sample(
            tokens=(*generation.prompt_ids, *generation.completion_ids),
            loss_mask=(0, 0, *(1 for _ in generation.completion_ids)),
            logprobs=(0.0, 0.0, *generation.logprobs),
            versions=(-1, -1, *generation.versions),
            advantages=(0.0, 0.0, *(0.0 for _ in generation.completion_ids)),
            temperature=temperature,
        )
        learner = (await backend.compute_logprobs(pack([row], IMITATE, 512)))[0][2:]
        assert learner == pytest.approx(list(generation.logprobs), abs=1e-4)
        await engine.close()
        await backend.close()

    async def test_the_digest_changes_with_the_weights_and_only_then(self, tmp_path: Path) -> None:
        backend = self.new_backend()
        policy = self.connect(backend)
        first, again = await policy.sync.sync(1), await policy.sync.sync(2)
        await backend.save(tmp_path / "as-it-was")
        await self.train(backend, self.samples(backend), IMITATE)
        changed = await policy.sync.sync(3)
        await backend.load(tmp_path / "as-it-was")
        back = await policy.sync.sync(4)
        assert first.digest == again.digest == back.digest != changed.digest
        await policy.engine.close()
        await backend.close()

    async def test_weights_that_did_not_arrive_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = self.new_backend()
        policy = self.connect(backend)
        before = await policy.sync.sync(1)
        await self.train(backend, self.samples(backend), IMITATE)

        async def lose_weights(version: int) -> str:
            return before.digest

        monkeypatch.setattr(policy.engine, "end_update", lose_weights)
        with pytest.raises(WeightSyncError, match=r"version 2 did not arrive: .* still decodes with .* version 1"):
            await policy.sync.sync(2)
        await policy.engine.close()
        await backend.close()

    async def test_an_engine_that_serves_an_old_version_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = self.new_backend()
        policy = self.connect(backend)
        await policy.sync.sync(1)
        end_update = policy.engine.end_update
        monkeypatch.setattr(policy.engine, "end_update", lambda version: end_update(1))
        with pytest.raises(WeightSyncError, match=r"version 2 did not arrive: .* says that it serves version 1"):
            await policy.sync.sync(2)
        await policy.engine.close()
        await backend.close()

    # ---- checkpoints and start-up ---------------------------------------------------------------------------------

    async def test_a_loaded_checkpoint_continues_exactly_where_it_was_saved(self, tmp_path: Path) -> None:
        one, two = self.new_backend(), self.new_backend()
        samples = self.samples(one)
        await self.train(one, samples, IMITATE)
        await one.save(tmp_path / "state")
        await two.load(tmp_path / "state")
        for backend in (one, two):  # a second step shows that the optimizer's moments came along
            await self.train(backend, samples, IMITATE)
        assert await self.logprobs(one, samples) == await self.logprobs(two, samples)
        await one.close()
        await two.close()

    async def test_a_snapshot_is_written_as_it_was_taken(self, tmp_path: Path) -> None:
        one, two = self.new_backend(), self.new_backend()
        if not isinstance(one, Snapshots):
            pytest.skip("this backend takes none")
        samples = self.samples(one)
        for number in range(2):  # the second may use the memory of the first
            await self.train(one, samples, IMITATE)
            write = await one.snapshot()
            await one.save(tmp_path / f"saved-{number}")
            await self.train(one, samples, IMITATE)
            await asyncio.to_thread(write, tmp_path / f"copied-{number}")
            assert _files(tmp_path / f"copied-{number}") == _files(tmp_path / f"saved-{number}")
        await two.load(tmp_path / "copied-1")
        await self.train(two, samples, IMITATE)
        assert await self.logprobs(one, samples) == await self.logprobs(two, samples)
        await one.close()
        await two.close()

    async def test_an_unknown_loss_is_an_error_at_start_up(self) -> None:
        backend = self.new_backend()
        with pytest.raises(ValueError, match="did you mean"):
            backend.check(RunConfig(algorithm=AlgorithmSection(loss="ppo_clp")))
        await backend.close()


def _files(folder: Path) -> dict[str, bytes]:
    """Without the index of torch.distributed.checkpoint, which holds an id of its own for every save."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".metadata"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
