"""What does the controller cost? 2,000 concurrent episodes on an engine and a backend that do nothing.

    python benchmarks/controller.py [--episodes N] [--profile] [--json FILE] [--quick]

Everything but the model is real: trainer, producer, agents, chat template, buffer, advantages, packing, metrics. The
engine answers immediately, or after 50 ms, so that the episodes are in flight at the same time. Prints two Markdown
tables: CPU time per episode, and resident memory after 10, 50 and 100 thousand episodes. `--quick` runs a tenth of the
episodes; `--profile` shows where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from headrace.data.task import Task
from headrace.rollout.model_client import Model
from headrace.trainer.callbacks import Callback, Metrics
from null_backend import Null, null_trainer, scattered, some_tasks

GROUP_SIZE = 8
IN_FLIGHT = 2000
MARKS = (10_000, 50_000, 100_000)
SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {"batch_size": IN_FLIGHT // GROUP_SIZE},
    "ahead": {"batch_size": IN_FLIGHT // GROUP_SIZE // 2, "max_staleness": 1, "placement": "separate"},
}


async def three_turns(task: Task, model: Model) -> float:
    """A conversation: each prompt is the one before, its reply and a question."""
    messages = [*task.messages]
    for _ in range(2):
        reply = await model.chat(messages)
        messages += [reply.message, {"role": "user", "content": "Are you sure?"}]
    reply = await model.chat(messages)
    return float(sum(reply.completion_ids) % 5)


WORKFLOWS = {"1 turn": scattered, "3 turns": three_turns}


@dataclass(frozen=True)
class Cost:
    """What one episode cost."""

    workflow: str
    schedule: str
    answers_after_ms: float
    episodes: int
    in_flight: int
    cpu_us: float
    wall_us: float


class Memory(Callback):
    """Resident megabytes, when so many episodes were trained."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_batch_end(self, step: int, metrics: Metrics) -> None:
        for mark in MARKS:
            if metrics["episodes/trained"] >= mark and mark not in self.found:
                self.found[mark] = resident_mb()


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(workflow: str, schedule: str, episodes: int, answers_after_s: float, *callbacks: Callback) -> Cost:
    """A run over so many episodes."""
    null = Null(lambda seed: answers_after_s, by_token=False, checks=False, remembers=False)
    trainer = SCHEDULES[schedule]
    steps = episodes // (trainer["batch_size"] * GROUP_SIZE)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        made = null_trainer(
            Path(folder), WORKFLOWS[workflow], some_tasks(1000), null=null, callbacks=callbacks,
            trainer={**trainer, "steps": steps, "save_last": False},
            rollout={"group_size": GROUP_SIZE, "max_concurrent": IN_FLIGHT, "max_tokens": 8},
        )  # fmt: skip
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        made.fit()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    count = steps * trainer["batch_size"] * GROUP_SIZE
    per = 1e6 / count
    return Cost(workflow, schedule, 1000 * answers_after_s, count, null.made[-1].engine.most_running, cpu_s * per,
                wall_s * per)  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20_000, help="episodes per row of the first table")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    episodes, last = (4_000, MARKS[0]) if args.quick else (args.episodes, MARKS[-1])
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(train, "1 turn", "ahead", episodes, 0.0)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    memory = Memory()
    train("1 turn", "ahead", last, 0.0, memory)  # first: what other runs left would count, too
    costs = [train(w, s, episodes, after) for w in WORKFLOWS for s in SCHEDULES for after in (0.0, 0.05)]
    print("| workflow | schedule | engine answers | in flight | processor, µs per episode | wall, µs per episode |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for cost in costs:
        answers = f"after {cost.answers_after_ms:g} ms" if cost.answers_after_ms else "immediately"
        measurements = f"{cost.in_flight} | {cost.cpu_us:.0f} | {cost.wall_us:.0f}"
        print(f"| {cost.workflow} | {cost.schedule} | {answers} | {measurements} |")
    print("\n| episodes | resident, MB |\n| ---: | ---: |")
    for mark, found in memory.found.items():
        print(f"| {mark:,} | {found:.1f} |")
    if args.json:
        table = {"per_episode": [asdict(cost) for cost in costs], "resident_mb": memory.found}
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
