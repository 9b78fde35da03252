"""From a configuration to ranks: how many, where they run, and with how many threads."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from headrace.backends.ranks.base import Program, Ranks
from headrace.backends.ranks.pipes import PipeRanks
from headrace.backends.ranks.thread import ThreadRank
from headrace.config import RunConfig
from headrace.engines.placement import learner_threads
from headrace.registry import load_object

_RANK = "headrace.backends.fsdp.rank:FsdpRank"


def rank_count(config: RunConfig) -> int:
    """How many ranks the run has."""
    if config.backend.ranks != "auto":
        return config.backend.ranks
    return max(1, torch.cuda.device_count())


def least_ranks(config: RunConfig) -> int:
    """How many hold the model between them; a run has so many, or a multiple."""
    return config.backend.shard or config.backend.tensor_parallel


class Launcher(Protocol):
    """Makes the ranks of a run: at its start, and after the loss of some."""

    def new(self) -> Ranks:
        """Ranks that are not started yet."""
        ...

    def has_more(self) -> bool:
        """Whether there is room for more ranks than the last group has."""
        ...


class LocalLauncher:
    """Processes of this machine, or one rank on a thread of this process."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def new(self) -> Ranks:
        config, size = self._config, rank_count(self._config)
        threads = rank_threads(config, size)
        program = rank_program(config, threads)
        if size == 1:
            return ThreadRank(program)
        environments = [environment(rank, threads) for rank in range(size)]
        return PipeRanks(program, size, config.backend.rank_timeout_s, environments)

    def has_more(self) -> bool:
        return False


def new_launcher(config: RunConfig) -> Launcher:
    """Ray actors where there is a cluster."""
    if config.cluster.address:
        return load_object("headrace.backends.fsdp.on_ray:RayLauncher")(config)
    return LocalLauncher(config)


def rank_program(config: RunConfig, threads: int) -> Program:
    """What every rank runs, with its share of the threads."""
    backend = config.backend.model_copy(update={"threads": threads})
    return Program(_RANK, (config.model_copy(update={"backend": backend}), config.backend.rank_timeout_s))


def rank_threads(config: RunConfig, size: int) -> int:
    """Threads of each rank: its share of what one learner would have. 0, for one rank: the library's own choice."""
    threads = learner_threads(config)
    if size == 1 or config.backend.threads:
        return threads
    return max(1, (threads or len(os.sched_getaffinity(0))) // size)


def environment(rank: int, threads: int) -> dict[str, str]:
    """Of a rank's process. It sees one GPU; processes that share cores must not wait for each other awake."""
    found = {"OMP_NUM_THREADS": str(max(1, threads)), "OMP_WAIT_POLICY": "PASSIVE"}
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices: list[Any] = visible.split(",") if visible else list(range(torch.cuda.device_count()))
        found["CUDA_VISIBLE_DEVICES"] = str(devices[rank % len(devices)])
    return found
