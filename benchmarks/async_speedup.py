"""Synchronous against asynchronous training on the long-tail workload: the same number of trained groups.

    python benchmarks/async_speedup.py [--seeds 0 1 2] [--steps 30] [--json FILE] [--quick]

For each seed both run one after the other, each in its own process: synchronous with the engine colocated, and
asynchronous with the engine separate. Seconds are those of training, without start-up and evaluation. `of ideal` is
max(generation, learning) over the seconds of the asynchronous run, that is the time of the slower side alone. Learning
is the learner's busy time; generation is the sum of all group durations over the groups that may be in flight. Finished
runs in --work are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from headrace.config.loading import load_config
from headrace.evaluation.evaluator import wilson_interval

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples" / "long_tail_async.toml"
KEY = "eval/countdown/pass@1"
SCHEDULES = {
    "synchronous": ("--trainer.max_staleness=0", "--trainer.placement=colocate"),
    "asynchronous": (),
}


@dataclass(frozen=True)
class Measurements:
    """What one run came to."""

    seconds: float
    groups: int
    ideal_s: float
    """The slower side alone; in synchronous training the two add up, so it is no bound there."""
    staleness: float
    reward: float
    tasks: int


def run(schedule: str, seed: int, work: Path, *extra: str) -> Measurements:
    """Train once, or read what an earlier call trained."""
    folder = work / f"{schedule.replace(' ', '_')}-{seed}"
    workflow = f"{ROOT / 'examples' / 'long_tail.py'}:LongTail"
    settings = [*SCHEDULES[schedule], f"--run.seed={seed}", f"--workflow.name={workflow}", *extra]
    if not (folder / "finished").exists():
        command = [sys.executable, "-m", "headrace", "train", str(FILE), f"--run-dir={folder}", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    config = load_config(FILE, settings)
    in_flight = 2 * config.trainer.batch_size * (1 + config.trainer.max_staleness)
    worked = [row for row in steps if row["time/group_s/count"]]
    generation_s = sum(row["time/group_s/mean"] * row["time/group_s/count"] for row in worked) / in_flight
    return Measurements(
        seconds=sum(row["time/step_s"] for row in steps),
        groups=round(steps[-1]["episodes/trained"] / config.rollout.group_size),
        ideal_s=max(sum(row["time/train_s"] for row in steps), generation_s),
        staleness=mean(row["staleness/mean"] for row in steps),
        reward=rows[-1][KEY],
        tasks=round(rows[-1]["eval/countdown/tasks"]),
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--work", type=Path, default=Path("runs/async_speedup"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    extra: list[str] = [f"--trainer.steps={args.steps}"]
    seeds, work = args.seeds, args.work
    if args.quick:
        seeds, work = [0], args.work / "quick"
        extra = ["--trainer.steps=5", "--eval.sets.countdown.args.count=20", "--eval.before=false"]
    table = {seed: {name: run(name, seed, work, *extra) for name in SCHEDULES} for seed in seeds}
    heads = ["seed", "groups", "synchronous", "asynchronous", "speed-up", "of ideal", "mean staleness"]
    print("| " + " | ".join([*heads, "held-out, synchronous", "held-out, asynchronous"]) + " |")
    print("| --- |" + " --- |" * 8)
    for seed, row in table.items():
        one, two = row["synchronous"], row["asynchronous"]
        print(
            f"| {seed} | {two.groups} | {one.seconds:.1f} s | {two.seconds:.1f} s | {one.seconds / two.seconds:.2f} | "
            f"{two.ideal_s / two.seconds:.2f} | {two.staleness:.1f} | {_score(one)} | {_score(two)} |"
        )
    if args.json:
        plain = {
            seed: {name: asdict(measurements) for name, measurements in row.items()} for seed, row in table.items()
        }
        args.json.write_text(json.dumps(plain, indent=2) + "\n")


def _score(measurements: Measurements) -> str:
    low, high = wilson_interval(round(measurements.reward * measurements.tasks), measurements.tasks)
    return f"{measurements.reward:.1%} ({low:.1%}–{high:.1%})"


if __name__ == "__main__":
    main()
