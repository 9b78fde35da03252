"""Shared by all tests: offline, one thread per process, no leftovers of other runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.tracking import catalogue

if TYPE_CHECKING:
    from fork_server import ForkServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# some virtual machines report matrix units for bfloat16 that they do not have
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
catalogue.strict = True  # what Headrace records must be in the catalogue


def pytest_configure() -> None:
    """`nohup`, or a shell that puts the tests in the background, ignores signals; tests send them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def any_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run: users may record keys that are not in the catalogue."""
    monkeypatch.setattr(catalogue, "strict", False)


@pytest.fixture(scope="module")
def tinker_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Tinker server of the bundled model."""
    from tinker_equality import tinker_server

    with tinker_server(tmp_path_factory.mktemp("tinker")) as address:
        yield address


@pytest.fixture
def through_tinker(tinker_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained with backend "tinker" is trained on that server."""
    monkeypatch.setenv("TINKER_BASE_URL", tinker_address)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Starts engine processes without importing torch for each."""
    from fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """For tests that set the number of threads."""
    import torch  # after the environment above, and only where it is needed

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks by fork: importing what they need takes seconds each time."""
    from fork_server import ForkServer
    from headrace.backends.ranks import pipes

    server = ForkServer("rank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipes, "launch_rank", server.launch_rank)
        yield
    server.close()
