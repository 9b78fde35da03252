"""Backend "verl" passes the backend contract, where verl is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from contracts.backend_contract import BackendContract
from headrace.backends.verl.backend import VerlBackend
from headrace.config import RunConfig
from verl_pool import WHY, has_verl, pooled_workers, verl_sections

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_verl(), reason=WHY)]


@pytest.fixture(autouse=True, scope="module")
def workers() -> Iterator[None]:
    with pooled_workers():
        yield


class VerlContract(BackendContract):
    ranks: ClassVar[int]
    settings: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls.settings = verl_sections(cls.ranks, **cls.settings)

    def make_backend(self, config: RunConfig) -> VerlBackend:
        torch.set_num_threads(1)
        return VerlBackend(config)


class TestOneRank(VerlContract):
    ranks = 1


class TestTwoRanks(VerlContract):
    ranks = 2


class TestTwoRanksWithAdapters(VerlContract):
    ranks = 2
    settings: ClassVar[dict[str, Any]] = {"model": {"lora": {"rank": 4}}}
