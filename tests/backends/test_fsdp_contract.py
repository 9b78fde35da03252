"""Backend "fsdp" passes the backend contract: on a thread, as processes, and as Ray actors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from contracts.backend_contract import BackendContract
from fork_server import ForkServer
from headrace.backends.fsdp.backend import FsdpBackend
from headrace.backends.ranks import pipes
from headrace.config import RunConfig


@pytest.fixture(autouse=True, scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks by fork: importing what they need takes seconds each time."""
    server = ForkServer("rank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipes, "launch_rank", server.launch_rank)
        yield
    server.close()


class FsdpContract(BackendContract):
    ranks: ClassVar[int]
    settings: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        backend = {"name": "fsdp", "ranks": cls.ranks}
        cls.settings = {"trainer": {"placement": "separate"}, **cls.settings, "backend": backend}

    def make_backend(self, config: RunConfig) -> FsdpBackend:
        torch.set_num_threads(1)
        return FsdpBackend(config)


class TestOneRankOnAThread(FsdpContract):
    ranks = 1


@pytest.mark.slow
class TestTwoRanks(FsdpContract):
    ranks = 2


@pytest.mark.slow
class TestTwoRanksInFloat64(FsdpContract):
    ranks = 2
    tolerance = 1e-10
    settings: ClassVar[dict[str, Any]] = {"model": {"dtype": "float64"}}


@pytest.mark.slow
class TestTwoRanksWithAdapters(FsdpContract):
    ranks = 2
    settings: ClassVar[dict[str, Any]] = {"model": {"lora": {"rank": 4}}}
