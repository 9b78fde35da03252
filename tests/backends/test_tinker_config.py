"""What the Tinker API cannot do is refused before anything is sent; what it does by itself is recognised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contracts.backend_contract import random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.tinker.backend import TinkerBackend
from headrace.backends.tinker.builtin import find_builtin, likely_scale
from headrace.backends.tinker.renderer import RenderedTokenizer, with_renderer
from headrace.backends.tinker.service import connect
from headrace.config import AlgorithmSection, TinkerSection
from headrace.config.loading import build_config
from headrace.errors import ConfigError, DataError, MissingExtraError
from headrace.models.load import load_tokenizer


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model.lora.rank=8", "set tinker.rank"),
        ("--algorithm.entropy_coef=0.1", "set tinker.vocabulary"),
        ("--rollout.temperature=0.7", "trains at temperature 1 only"),
        ("--rollout.temperature=0.7 --tinker.vocabulary=511 --algorithm.kl.coef=0.1", "reference"),
        (
            "--algorithm.value_head=true --algorithm.estimator=gae",
            "needs a value head",
        ),
        ("--run.deterministic=true", "run.deterministic"),
        ("--model.dtype=bfloat16", "model.dtype"),
        ("--backend.threads=2", "backend.threads"),
        ("--engine.prefill_tokens=64", "engine.prefill_tokens"),
        ("--trainer.max_staleness=1 --engine.cache_on_publish=recompute", "set tinker.segment_tokens"),
        ("--trainer.max_staleness=1 --tinker.segment_tokens=8", 'engine.cache_on_publish = "recompute"'),
        ("--tinker.segment_tokens=8", "trainer.max_staleness is 0"),
        ("--trainer.placement=separate", "trainer.placement"),
        ("--tinker.state=runs/mine", "tinker://RUN/weights/NAME"),
        ("--tinker.state_optimizer=false", "has no effect: tinker.state is empty"),
        ("--tinker.train_attn=false --tinker.train_mlp=false --tinker.train_unembed=false", "nothing would be trained"),
    ],
)
def test_what_the_service_cannot_do_is_refused_with_the_remedy(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TinkerBackend.check(build_config({"backend": {"name": "tinker"}}, words.split()))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--engine.name=tinker --trainer.max_staleness=2",
        "--tinker.vocabulary=511 --algorithm.entropy_coef=0.1 --rollout.temperature=0.7",
        "--tinker.segment_tokens=8 --engine.cache_on_publish=recompute --trainer.max_staleness=1",
        "--algorithm.kl.coef=0.1 --optimizer.weight_decay=0.1 --backend.micro_batch_tokens=64",
    ],
)
def test_what_the_service_can_do_is_accepted(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    TinkerBackend.check(build_config({"backend": {"name": "tinker"}}, words.split()))


def test_a_key_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"MY_KEY \(tinker.api_key_env\) is not set; export"):
        connect(TinkerSection(api_key_env="MY_KEY", base_url="https://far.example"))


BUILT_IN = {
    "cross_entropy": "cross_entropy", "reinforce": "cross_entropy", "importance_sampling": "importance_sampling",
    "ppo_clip": "ppo", "cispo": "cispo", "gspo": None, "dppo_tv": None, "dppo_kl": None, "dpo": None,
}  # fmt: skip


@pytest.mark.parametrize(("loss", "name"), BUILT_IN.items())
def test_only_a_loss_with_the_same_meaning_is_left_to_the_service(loss: str, name: str | None) -> None:
    found = find_builtin(AlgorithmSection(loss=loss), random_samples(3, 90))
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    "changes",
    [
        {"dual_clip": 3.0},
        {"entropy_coef": 0.1},
        {"kl": {"coef": 0.1}},
        {"proximal": "recompute"},
        {"proximal": "recompute", "correction": {"name": "tis"}},
        {"roles": {"agent": {"loss": "gspo"}}},
    ],
    ids=str,
)
def test_whatever_is_put_onto_a_loss_is_computed_here(changes: dict[str, Any]) -> None:
    assert find_builtin(AlgorithmSection(loss="ppo_clip", **changes), random_samples(3, 90)) is None


def test_the_clip_and_the_denominator_go_to_the_service_as_they_are_meant() -> None:
    samples = [replace(s, old_logprobs=tuple(-1.0 for _ in s.loss_mask)) for s in random_samples(2, 90)]
    given = {
        proximal: find_builtin(AlgorithmSection(clip_low=0.1, clip_high=0.3, proximal=proximal), samples)
        for proximal in ("sampler", "recompute")
    }
    for proximal, found in given.items():
        assert found is not None
        assert found.settings == pytest.approx({"clip_low_threshold": 0.9, "clip_high_threshold": 1.3})
        row = found.datums(samples, [2.0, 1.0], 0.5)[0].loss_fn_inputs
        kept = np.asarray(samples[0].loss_mask) != 0
        old = samples[0].logprobs if proximal == "sampler" else samples[0].old_logprobs
        np.testing.assert_allclose(np.asarray(row["logprobs"].data)[kept], np.asarray(old)[kept], rtol=1e-6)
        expected = np.where(kept, samples[0].advantages, 0.0)
        np.testing.assert_allclose(row["advantages"].data, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum", "constant"]
)
def test_the_normaliser_of_a_step_is_known_beforehand(aggregation: Any) -> None:
    algorithm = AlgorithmSection(aggregation=aggregation)
    batch = pack(random_samples(5, 90), algorithm, 64)
    assert likely_scale(batch, algorithm) == grad_scale([batch], algorithm)


class Backwards:
    """A renderer, as tinker-cookbook makes them, that writes what it is told."""

    def __init__(self, tokenizer: Any, stop: list[Any]) -> None:
        self._tokenizer, self._stop = tokenizer, stop

    def build_generation_prompt(self, messages: Any) -> Any:
        import tinker

        text = "".join(message["content"][::-1] for message in messages)
        return tinker.ModelInput.from_ints(self._tokenizer.encode(text, add_special_tokens=False))

    def get_stop_sequences(self) -> list[Any]:
        return self._stop


def test_a_renderer_writes_the_prompt_and_says_what_ends_a_reply() -> None:
    tokenizer = load_tokenizer("bundled")
    rendered = RenderedTokenizer(tokenizer, Backwards(tokenizer, [2, 7]), "backwards")
    assert rendered.apply_chat_template([{"role": "user", "content": "abc"}]) == "cba"
    assert rendered.stop_ids == [2, 7] and len(rendered) == len(tokenizer) and rendered.eos_token_id == 2


def test_a_renderer_whose_ids_are_not_those_of_its_text_is_refused() -> None:
    tokenizer = load_tokenizer("bundled")

    class Torn(Backwards):
        def build_generation_prompt(self, messages: Any) -> Any:
            import tinker

            return tinker.ModelInput.from_ints([i for letter in "User" for i in self._tokenizer.encode(letter)])

    with pytest.raises(DataError, match="does not make of their text"):
        RenderedTokenizer(tokenizer, Torn(tokenizer, [2]), "torn").apply_chat_template([])


def test_a_renderer_without_tinker_cookbook_says_what_to_install() -> None:
    try:
        import tinker_cookbook  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        config = build_config({"backend": {"name": "tinker"}, "tinker": {"renderer_name": "qwen3"}})
        with pytest.raises(MissingExtraError, match="pip install tinker-cookbook"):
            with_renderer(config, load_tokenizer("bundled"))
