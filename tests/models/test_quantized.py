"""Base models in few bits: refused with a remedy where the package is missing; trained under adapters where it is."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from contracts.backend_contract import IMITATE, random_samples
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.local.learner import Learner
from headrace.config.loading import build_config
from headrace.errors import ConfigError

HERE = importlib.util.find_spec("bitsandbytes") is not None


def settings(kind: str, rank: int = 4) -> dict[str, Any]:
    return {"model": {"device": "cpu", "quantize": kind, "lora": {"rank": rank}}}


@pytest.mark.skipif(HERE, reason="bitsandbytes is installed")
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r'model.quantize = "nf4" needs the package bitsandbytes.*pip install'):
        Learner(build_config(settings("nf4")))


def test_weights_that_are_trained_are_not_quantised() -> None:
    with pytest.raises(ConfigError, match=r"model.quantize.*model.lora.rank is 0, and quantised weights cannot"):
        build_config(settings("nf4", rank=0))


@pytest.mark.skipif(not HERE, reason="needs bitsandbytes")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_on_a_quantised_base_learn(kind: str) -> None:
    torch.set_num_threads(1)
    learner = Learner(build_config(settings(kind)))
    batch = pack(random_samples(6, 90), IMITATE, 100)
    losses = []
    for _ in range(6):
        losses.append(learner.forward_backward(batch, IMITATE).metrics.reduce()["policy/loss"])
        learner.optim_step(3e-3, grad_scale([batch], IMITATE))
    assert losses[-1] < losses[0] - 0.02
    assert {p.dtype for p in learner.hf_model.parameters() if p.requires_grad} == {torch.float32}
