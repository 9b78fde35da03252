"""What do ranks cost? The same learner on a thread of this process, and in a process at the end of a pipe.

    python benchmarks/ranks.py [--model smollm2-135m] [--rounds 5] [--rows 16] [--length 160] [--json FILE] [--quick]

Prints a Markdown table: seconds of a training step (forward and backward over all rows, optimizer step, gathering the
weights into shared memory), of both, one after the other in every round, with the ratio of each round. Medians, with
the lowest and the highest. Both use one thread, so that they differ by the layers between caller and learner alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from _arguments import parsed
from _tables import print_table, spread

from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.fsdp.launching import environment, rank_program
from headrace.backends.fsdp.sending import RankBuffers, RankWeights
from headrace.backends.ranks.base import Ranks
from headrace.backends.ranks.pipes import PipeRanks
from headrace.backends.ranks.thread import ThreadRank
from headrace.config import AlgorithmSection
from headrace.config.loading import build_config
from headrace.data.sample import Sample, TrainBatch

_ALGORITHM = AlgorithmSection(loss="ppo_clip")


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of a step."""

    thread_s: float
    pipe_s: float

    @property
    def ratio(self) -> float:
        return self.pipe_s / self.thread_s


@dataclass(frozen=True, slots=True)
class Given:
    """Launches ranks that are there already."""

    ranks: Ranks

    def new(self) -> Ranks:
        return self.ranks

    def has_more(self) -> bool:
        return False


class Side:
    """A learner and how it is reached."""

    def __init__(self, model: str, piped: bool) -> None:
        backend = {"name": "fsdp", "ranks": 1, "threads": 1}
        config = build_config(
            {
                "model": {"name": model},
                "backend": backend,
                "trainer": {"placement": "separate"},
                "optimizer": {"lr": 1e-6},
            }
        )
        program = rank_program(config, threads=1)

        ranks = PipeRanks(program, 1, 600.0, [environment(0, 1)]) if piped else ThreadRank(program)
        self.group = LearnerGroup(Given(ranks), config.backend.micro_batch_tokens)
        self.buffers = RankBuffers(RankWeights(self.group, None), self.group.together("facts")[0]["infos"])  # type: ignore[arg-type]

    def step(self, batch: TrainBatch) -> float:
        began = time.perf_counter()
        self.group.forward_backward(batch, _ALGORITHM)
        self.group.optim_step(1e-6, grad_scale([batch], _ALGORITHM))
        self.buffers.copy_into(0)
        return time.perf_counter() - began


def random_batch(rows: int, length: int, seed: int) -> TrainBatch:
    rng = random.Random(seed)
    samples = [
        Sample(
            tokens=tuple(rng.randrange(1000) for _ in range(length)),
            loss_mask=(1,) * (length - 1),
            logprobs=tuple(-rng.random() for _ in range(length - 1)),
            versions=(0,) * (length - 1),
            advantages=(rng.uniform(-1, 1),) * (length - 1),
        )
        for _ in range(rows)
    ]
    return pack(samples, _ALGORITHM, 3072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the bundled model and few rounds")
    given = parsed(parser, {"model": "bundled", "rounds": 2})
    torch.set_num_threads(1)
    thread, pipe = Side(given.model, piped=False), Side(given.model, piped=True)
    warm = random_batch(2, 32, 0)
    for side in (thread, pipe):
        side.step(warm)
    rounds = []
    for number in range(given.rounds):
        batch = random_batch(given.rows, given.length, number + 1)
        rounds.append(Round(thread.step(batch), pipe.step(batch)))
    thread.group.close()
    pipe.group.close()
    print_table(
        ["step", "seconds"],
        [
            ["on a thread", spread([one.thread_s for one in rounds])],
            ["at the end of a pipe", spread([one.pipe_s for one in rounds])],
            ["ratio", f"{median(one.ratio for one in rounds):.3f}"],
        ],
    )
    if given.json:
        given.json.write_text(json.dumps([asdict(one) | {"ratio": one.ratio} for one in rounds], indent=1))


if __name__ == "__main__":
    main()
