"""What backend "fsdp" refuses before anything is loaded, and what it honours with one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from headrace.backends.fsdp import sharding
from headrace.backends.fsdp.backend import check_ranks
from headrace.backends.fsdp.learner import RankLearner
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.errors import ConfigError


def config(backend: dict[str, Any], **sections: Any) -> RunConfig:
    given = {"backend": {"name": "fsdp", **backend}, "trainer": {"placement": "separate"}, **sections}
    return build_config(given)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_than_gpus_are_refused() -> None:
    for ranks in (1, 2, "auto"):
        check_ranks(config({"ranks": ranks, "cpu_offload": True}))
    check_ranks(config({"ranks": 3}, model={"device": "cpu"}))
    check_ranks(config({"ranks": 3}, cluster={"address": "auto", "learner": {"GPU": 1}}))
    with pytest.raises(ConfigError, match=r"backend\.ranks = 3 is more than the 2 GPUs .* set it to 2 at most"):
        check_ranks(config({"ranks": 3}))


@pytest.mark.usefixtures("two_gpus")
def test_an_optimizer_with_shards_is_not_moved_to_the_host_as_a_whole() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.offload = true .* backend\.cpu_offload = true"):
        check_ranks(config({"ranks": 2}, optimizer={"offload": True}))


def test_one_rank_keeps_its_shards_in_host_memory_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[Any] = []

    def policy() -> CPUOffloadPolicy:
        policies.append(CPUOffloadPolicy(pin_memory=False))  # there is nothing here to pin it for
        return policies[-1]

    monkeypatch.setattr(sharding, "CPUOffloadPolicy", policy)
    RankLearner(config({"ranks": 1, "cpu_offload": True}, model={"dtype": "float32"}), 0, 1)
    assert policies
