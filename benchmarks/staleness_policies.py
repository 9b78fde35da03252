"""Which staleness policy is bounded, unbiased against slow tasks, and does not stall? In the simulator.

    python benchmarks/staleness_policies.py [--json FILE] [--quick]
    python benchmarks/staleness_policies.py --against RUN_DIR [RUN_DIR ...] [--json FILE]

The scenario: batches of 64 groups, 384 in flight, one task in ten 12 times slower, bound 4. A group takes a minute
(median; slow ones twelve), so a full engine makes 384 / (0.9 * 1 + 0.1 * 12) = 183 groups a minute, a little less by
the spread of durations. The learner is given 90% of that: a perfect pipeline keeps it busy all the time and has a tenth
of the engine to spare. One that leaves slots empty, waits, or trains less than it generates does not.

A slow task then runs for about 31 versions, eight times the bound. Its tokens are spread evenly over them. Waste is
counted twice: by tokens, as if slow tasks sample as much as others (they wait for tools), and by time, as if they were
slow because they sample twelve times as much.

`--against` simulates recorded runs with their own settings and durations, and compares prediction and measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.registry import register
from headrace.scheduling.simulation.simulator import simulate
from headrace.scheduling.simulation.tally import Outcome
from headrace.scheduling.staleness import Drop, Mask
from headrace.tracking.jsonl import FILE_NAME, read_rows

BATCH, IN_FLIGHT, BOUND = 64, 384, 4
SLOW_SHARE, SLOW_FACTOR = 0.1, 12.0
GROUP_S, SPREAD = 60.0, 0.2
LOAD = 0.9
POLICIES = ("count", "drop", "wait", "mask", "trust")
TARGETS = {"learner_busy": 0.95, "slow_groups": 0.9, "wasted_tokens": 0.05, "rows_too_far": 0}


class DropFreely(Drop):
    """`drop`, with the admission of `trust`: what of its advantage is admission alone?"""

    excuses_overdue = True


class MaskFreely(Mask):
    """`mask`, with the admission of `trust`."""

    excuses_overdue = True


def scenario(policy: str, steps: int, *settings: str) -> RunConfig:
    """The run file of the scenario."""
    mean_s = GROUP_S * (1 - SLOW_SHARE + SLOW_SHARE * SLOW_FACTOR) * math.exp(SPREAD**2 / 2)
    values = {
        "trainer": {"batch_size": BATCH, "max_staleness": BOUND, "staleness": policy},
        "rollout": {"group_size": 1, "max_concurrent": IN_FLIGHT},
        "algorithm": {"estimator": "reinforce"},  # a group of one: only complete groups matter here
        "simulate": {
            "group_s": GROUP_S,
            "group_spread": SPREAD,
            "slow_share": SLOW_SHARE,
            "slow_factor": SLOW_FACTOR,
            "learn_s": BATCH / (LOAD * IN_FLIGHT / mean_s),
            "steps": steps,
            "warmup": max(100, steps // 10),  # slow tasks come back after some 30 to 60 versions
        },
    }
    return build_config(values, settings)


def compare_policies(steps: int) -> dict[str, Outcome]:
    """Every policy on the scenario."""
    register("staleness", "drop_freely", DropFreely)
    register("staleness", "mask_freely", MaskFreely)
    runs = {policy: scenario(policy, steps) for policy in POLICIES}
    runs["trust, oldest first"] = scenario("trust", steps, "--produce.order=oldest_version")
    runs["drop, admission of trust"] = scenario("drop_freely", steps)
    runs["mask, admission of trust"] = scenario("mask_freely", steps)
    return {name: simulate(config) for name, config in runs.items()}


def print_policies(found: dict[str, Outcome]) -> None:
    """As a table in Markdown."""
    print("| policy | oldest | rows beyond age bound | rows beyond divergence bound | slow groups | slow tokens "
          "| learner busy | engine busy | wasted tokens | wasted time | rows measured |")  # fmt: skip
    print("| --- |" + " ---: |" * 10)
    for name, outcome in found.items():
        far = str(outcome.rows_too_far) if name.startswith("trust") else "–"
        print(f"| {name} | {outcome.staleness_max} | {outcome.rows_too_old:.1%} | {far} | {outcome.slow_groups:.1%} "
              f"| {outcome.slow_tokens:.1%} | {outcome.learner_busy:.1%} | {outcome.generation_busy:.1%} "
              f"| {outcome.wasted_tokens:.1%} | {outcome.wasted_time:.1%} | {outcome.rows_measured:.1%} |")  # fmt: skip


def frontier(steps: int) -> dict[str, Outcome]:
    """`trust` under other drifts: how it grows with age, how tasks differ in it, and how it compares with rounding.

    If slow tasks sample everything at the start and then wait, all their tokens are as old as can be.
    """
    found: dict[str, Outcome] = {}
    for power, growth in ((0.5, "random walk"), (1.0, "steady drift")):
        for spread in (0.0, 0.25, 0.5, 1.0):
            words = (f"--simulate.drift.power={power}", f"--simulate.drift.spread={spread}")
            found[f"{growth}, spread {spread:g}"] = simulate(scenario("trust", steps, *words))
        early = (f"--simulate.drift.power={power}", "--simulate.slow_token_place=0.04")
        found[f"{growth}, spread 0.5, slow tasks wait after their tokens"] = simulate(scenario("trust", steps, *early))
    for ratio in (0.1, 0.3, 1.0, 3.0):
        words = ("--simulate.drift.power=1.0", "--simulate.drift.spread=0.25", "--simulate.drift.noise=0.01",
                 f"--simulate.drift.sigma={0.01 * ratio}")  # fmt: skip
        found[f"steady drift, spread 0.25, {ratio:g} × rounding"] = simulate(scenario("trust", steps, *words))
    return found


def print_frontier(found: dict[str, Outcome]) -> None:
    """As a table in Markdown."""
    print("| drift | learner busy | slow groups | slow tokens | wasted tokens | wasted time | beyond its bound |")
    print("| --- |" + " ---: |" * 6)
    for name, outcome in found.items():
        print(f"| {name} | {outcome.learner_busy:.1%} | {outcome.slow_groups:.1%} | {outcome.slow_tokens:.1%} "
              f"| {outcome.wasted_tokens:.1%} | {outcome.wasted_time:.1%} | {outcome.rows_too_far} |")  # fmt: skip


def print_targets(outcome: Outcome) -> bool:
    """Whether `trust` reaches what it must."""
    met = {
        "learner busy": (outcome.learner_busy, f">= {TARGETS['learner_busy']}", outcome.learner_busy >= 0.95),
        "slow groups": (outcome.slow_groups, f">= {TARGETS['slow_groups']}", outcome.slow_groups >= 0.9),
        "wasted tokens": (outcome.wasted_tokens, f"<= {TARGETS['wasted_tokens']}", outcome.wasted_tokens <= 0.05),
        "rows beyond its bound": (outcome.rows_too_far, "0", outcome.rows_too_far == 0),
    }
    for name, (value, target, ok) in met.items():
        print(f"trust: {name} {value:.3g}, target {target}: {'met' if ok else 'MISSED'}")
    return all(ok for _, _, ok in met.values())


# ---- against recorded runs -------------------------------------------------------------------------------------------


def against(run_dir: Path) -> dict[str, dict[str, float]]:
    """Predicted and measured metrics of a recorded run, both without its first quarter."""
    values = json.loads((run_dir / "config.json").read_text())
    rows = [row for row in read_rows(run_dir / FILE_NAME).values() if "time/train_s" in row]
    values["simulate"] = {"from_run": str(run_dir), "steps": len(rows), "warmup": len(rows) // 4}
    config = build_config(values, where=str(run_dir))
    predicted = simulate(config, ends=True)
    counted = rows[len(rows) // 4 :]
    trained = config.fresh_groups * len(counted)
    measured = {
        "groups_per_s": trained / sum(row["time/step_s"] for row in counted),
        "staleness_mean": fmean(row.get("staleness/mean", 0.0) for row in counted),
        "learner_busy": sum(row["time/train_s"] for row in counted) / sum(row["time/step_s"] for row in counted),
    }
    return {
        key: {"predicted": getattr(predicted, key), "measured": value, "ratio": _ratio(getattr(predicted, key), value)}
        for key, value in measured.items()
    }


def _ratio(predicted: float, measured: float) -> float:
    return predicted / measured if measured else float(predicted == measured)


def print_against(runs: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """As a table in Markdown, row by row."""
    print("| run | metric | predicted | measured | ratio |\n| --- | --- | ---: | ---: | ---: |")
    for run_dir in runs:
        found = against(run_dir)
        for key, row in found.items():
            print(f"| {run_dir.name} | {key} | {row['predicted']:.4g} | {row['measured']:.4g} | {row['ratio']:.3f} |")
        yield str(run_dir), found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.against:
        results: dict[str, Any] = dict(print_against(args.against))
    else:
        results = run_scenario(args.quick)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def run_scenario(quick: bool) -> dict[str, Any]:
    """The policies, the frontier and the speed of the simulator."""
    started = time.perf_counter()
    policies = compare_policies(200 if quick else 2000)
    wall_s, virtual_s = time.perf_counter() - started, sum(outcome.end_s for outcome in policies.values())
    print_policies(policies)
    print(f"\n{virtual_s / 86400:.1f} days simulated in {wall_s:.0f} s: {virtual_s / wall_s:,.0f} times real time\n")
    met = print_targets(policies["trust"])
    print("\n`trust` under other drifts (the policies above do not depend on it):\n")
    drifts = frontier(200 if quick else 600)
    print_frontier(drifts)
    return {
        "policies": {name: asdict(outcome) for name, outcome in policies.items()},
        "drifts": {name: asdict(outcome) for name, outcome in drifts.items()},
        "times_real_time": virtual_s / wall_s,
        "targets_met": met,
    }


if __name__ == "__main__":
    main()
