"""The Tinker backend passes the backend contract through a real server, and keeps what is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from contracts.backend_contract import IMITATE, REINFORCE_LIKE, BackendContract, random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.base import Backend
from headrace.backends.setup import attach_engine, choose
from headrace.backends.tinker.backend import TinkerBackend, read_state
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.episode import Step
from headrace.errors import BackendError, ConfigError, DataError

VOCABULARY = 511


pytestmark = pytest.mark.usefixtures("through_tinker")


OWN: dict[str, Any] = {"rank": 4, "train_unembed": False}


def make_tinker(**changes: Any) -> TinkerBackend:
    own, backend = {**OWN, **changes.pop("tinker", {})}, {"name": "tinker", **changes.pop("backend", {})}
    return TinkerBackend(build_config({"backend": backend, "tinker": own, **changes}))


class TinkerContract(BackendContract):
    settings: ClassVar[dict[str, Any]] = {"backend": {"name": "tinker"}, "tinker": OWN}

    def new_backend(self, **changes: Any) -> Backend:
        backend = {"name": "tinker", **changes.pop("backend", {})}
        return super().new_backend(backend=backend, **changes)

    def make_backend(self, config: RunConfig) -> TinkerBackend:
        return TinkerBackend(config)


@pytest.mark.slow
class TestWholeDistributions(TinkerContract):
    """Temperatures other than 1 and entropies need the whole distribution."""

    settings: ClassVar[dict[str, Any]] = {**TinkerContract.settings, "tinker": {**OWN, "vocabulary": VOCABULARY}}


@pytest.mark.slow  # a minute; the tests below, and whole runs, are the quick part
class TestTargetsOnly(TinkerContract):
    """What the API returns as a rule: log-probabilities of the targets, at temperature 1."""

    async def test_the_log_probability_of_every_trained_target_is_found(self) -> None:
        backend = self.new_backend()
        samples = self.samples(backend)
        batch = pack(samples, REINFORCE_LIKE, 30)
        scored = await backend.compute_logprobs(batch)
        found = await backend.forward_backward(batch, REINFORCE_LIKE)
        for sample, trained, row in zip(samples, found.logprobs, scored, strict=True):
            expected = [value for value, kept in zip(row, sample.loss_mask, strict=True) if kept]
            assert list(trained) == pytest.approx(expected, abs=self.tolerance)
        with pytest.raises(DataError, match=r"temperature 0\.7.*tinker\.vocabulary"):
            await backend.compute_logprobs(pack([replace(samples[0], temperature=0.7)], IMITATE, 512))
        await backend.close()

    async def test_the_loss_of_preferences_is_reported_per_pair_and_starts_at_ln_2(self) -> None:
        backend = self.new_backend()
        samples = self.samples(backend, 6)
        scored = await backend.compute_logprobs(pack(samples, IMITATE, 512), of="reference")
        pairs = [replace(s, reference_logprobs=tuple(row)) for s, row in zip(samples, scored, strict=True)]
        algorithm = AlgorithmSection(loss="dpo", aggregation="sequence_mean_token_sum")
        found = (await backend.forward_backward(pack(pairs, algorithm, 30, together=2), algorithm)).metrics.reduce()
        assert found["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)
        assert "policy/entropy" not in found  # nothing is reported that is not known
        await backend.close()

    @pytest.mark.parametrize("temperature", [1.0])
    async def test_the_engine_samples_from_the_synced_weights(self, temperature: float) -> None:
        await super().test_the_engine_samples_from_the_synced_weights(temperature)


@pytest.mark.slow
class TestOnePass(TestTargetsOnly):
    """Without streaming, losses that the service has are sent as such, with a normaliser that may turn out wrong."""

    settings: ClassVar[dict[str, Any]] = {**TinkerContract.settings, "trainer": {"stream": False}}


async def step(backend: TinkerBackend, seed: int = 0) -> None:
    batch = pack(random_samples(4, 90, seed), IMITATE, 512)
    await backend.forward_backward(batch, IMITATE)
    await backend.optim_step(1e-2, grad_scale([batch], IMITATE))


async def scores(backend: TinkerBackend) -> list[float]:
    (row,) = await backend.compute_logprobs(pack(random_samples(1, 90), IMITATE, 512))
    return row


@pytest.mark.parametrize("loss", ["cross_entropy", "reinforce", "importance_sampling", "ppo_clip", "cispo"])
async def test_a_loss_of_the_service_makes_the_same_step_as_ours(loss: str) -> None:
    algorithm, results = AlgorithmSection(loss=loss), []
    for stream in (True, False):
        backend = make_tinker(trainer={"stream": stream}, optimizer={"eps": 1.0, "grad_clip": 0.0})
        batch = pack(random_samples(8, 90), algorithm, 60)
        await backend.forward_backward(batch, algorithm)
        assert all((row.sent > 0) is not stream for row in backend._pending)
        norm = (await backend.optim_step(1e-2, grad_scale([batch], algorithm))).reduce()["policy/grad_norm"]
        results.append([norm, *await scores(backend)])
        await backend.close()
    assert results[0] == pytest.approx(results[1], abs=1e-5, rel=1e-5)  # sums in another order


async def test_a_new_run_resumes_from_a_saved_state_which_is_its_reference(tmp_path: Path) -> None:
    first = make_tinker()
    await step(first)
    await first.save(tmp_path)
    path = read_state(tmp_path)["state"]
    assert path.startswith("tinker://") and "/weights/" in path
    expected = await scores(first)
    for optimizer in (True, False):
        backend = make_tinker(tinker={"state": path, "state_optimizer": optimizer})
        assert await scores(backend) == pytest.approx(expected, abs=1e-6)
        await step(backend)
        (reference,) = await backend.compute_logprobs(pack(random_samples(1, 90), IMITATE, 512), of="reference")
        assert reference == pytest.approx(expected, abs=1e-4)
        await backend.close()
    await first.close()


async def test_a_checkpoint_of_another_rank_is_refused(tmp_path: Path) -> None:
    one, two = make_tinker(), make_tinker(tinker={"rank": 8})
    await one.save(tmp_path)
    with pytest.raises(BackendError, match=r"another model: its rank is 4, and the run has 8"):
        await two.load(tmp_path)
    with pytest.raises(BackendError, match="cannot read the checkpoint"):
        await two.load(tmp_path / "nowhere")
    await one.close()
    await two.close()


async def test_a_teacher_scores_what_the_student_said_and_can_be_refreshed(tmp_path: Path) -> None:
    backend = make_tinker(algorithm={"estimator": "distill"}, distill={"refresh_every": 2})
    sample = random_samples(1, 90)[0]
    said = Step(sample.tokens[:4], sample.tokens[4:], logprobs=sample.logprobs[3:])
    start = (await backend.teacher_logprobs([said]))[0]
    assert start == pytest.approx((await scores(backend))[3:], abs=1e-4)
    await step(backend)
    assert (await backend.teacher_logprobs([said]))[0] == pytest.approx(start, abs=1e-6)
    await backend.refresh_teacher()
    refreshed = (await backend.teacher_logprobs([said]))[0]
    assert refreshed == pytest.approx((await scores(backend))[3:], abs=1e-4)
    await backend.save(tmp_path)
    await step(backend)
    await backend.load(tmp_path)
    assert (await backend.teacher_logprobs([said]))[0] == pytest.approx(refreshed, abs=1e-6)
    await backend.close()


def test_an_unknown_model_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r'train a model "bundle" \(did you mean "bundled"\?\)'):
        make_tinker(tinker={"model": "bundle"})


def test_a_length_beyond_the_service_is_refused() -> None:
    sections: dict[str, Any] = {"backend": {"name": "tinker"}, "engine": {"max_model_length": 4096}}
    config, backend = build_config(sections), make_tinker(**sections)
    with pytest.raises(ConfigError, match=r"max_model_length is 4096.*no more than 1024"):
        attach_engine(config, backend, choose(config))


async def test_a_failed_request_names_the_call_and_the_model() -> None:
    backend = make_tinker()
    sample = replace(random_samples(1, 90)[0], tokens=(*range(3), VOCABULARY + 5), loss_mask=(1, 1, 1),
        logprobs=(0.0,) * 3, versions=(0,) * 3, advantages=(0.0,) * 3)  # fmt: skip
    with pytest.raises(BackendError, match=rf"Tinker: forward of {backend._training.model_id}.* failed.*516"):
        await backend.compute_logprobs(pack([sample], IMITATE, 512))
    await backend.close()


async def test_weights_cannot_be_exported_and_the_error_says_where_they_are(tmp_path: Path) -> None:
    backend = make_tinker()
    with pytest.raises(BackendError, match="tinker checkpoint download"):
        await backend.export(tmp_path / "model")
    await backend.close()
