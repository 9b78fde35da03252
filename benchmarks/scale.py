"""Where does a growing run meet its first limit? Controller, ledger and weight sync, for 8 to 10,000 engines.

    python benchmarks/scale.py [--episodes 8000] [--plot FILE] [--json FILE] [--quick]

Measures what an episode costs the controller (trainer, agents, buffer, metrics; an engine and a backend that do
nothing), with and without the ledger, and how fast the ledger's file takes episodes. Both are of this machine. What an
engine, a network and a learner can do is given (`--tokens-per-s`, `--gbps`, `--step-s` ...): the defaults are round
numbers for a model of 8 billion parameters in bfloat16 on one GPU per engine, not measurements.

Prints a Markdown table: for each limit, the number of engines at which it is reached, and the load at 100, 1,000
and 10,000. Then `headrace simulate` runs fleets of up to 100 engines with losses of
nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _arguments import parsed
from _tables import print_table
from controller import GROUP_SIZE, IN_FLIGHT, WORKFLOWS

from headrace.config import FleetSection
from headrace.config.loading import build_config
from headrace.scheduling.simulation.fleet import sync_seconds
from headrace.scheduling.simulation.simulator import simulate
from null_backend import Null, null_trainer, some_tasks

FLEETS = (8, 32, 100, 316, 1000, 3162, 10_000)
SHOWN = (100, 1000, 10_000)
SIMULATED = FLEETS[:3]
TOGETHER = 6  # episodes that an engine runs at once; here also those of a group


@dataclass(frozen=True)
class Measured:
    """Seconds of processor time per episode: the controller's own, and what the ledger adds."""

    controller_s: float
    ledger_s: float


@dataclass(frozen=True)
class Given:
    """What is not measured here."""

    tokens_per_s: float
    tokens: int
    weights_gb: float
    gbps: float
    storage_gbps: float
    step_s: float

    def episodes_per_s(self, engines: int) -> float:
        return engines * self.tokens_per_s / self.tokens

    def fleet(self, engines: int, transport: str, share: float = 1.0) -> FleetSection:
        values = {"weights_gb": self.weights_gb, "bandwidth_gbps": self.gbps, "storage_gbps": self.storage_gbps}
        return FleetSection.model_validate({**values, "engines": engines, "transport": transport, "sent_share": share})


def cpu_per_episode(workflow: str, episodes: int, ledger: bool) -> float:
    """Processor time of the whole process for one episode, in seconds."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        batch = IN_FLIGHT // GROUP_SIZE // 2
        steps = max(1, episodes // (batch * GROUP_SIZE))
        trainer = null_trainer(
            Path(folder), WORKFLOWS[workflow], some_tasks(1000),
            null=Null(lambda seed: 0.0, by_token=False, checks=False, remembers=False),
            trainer={"batch_size": batch, "max_staleness": 1, "placement": "separate", "steps": steps,
                     "save_last": False},
            rollout={"group_size": GROUP_SIZE, "max_concurrent": IN_FLIGHT, "max_tokens": 8},
            ledger={"enabled": ledger},
        )  # fmt: skip
        began = time.process_time()
        trainer.fit()
        return (time.process_time() - began) / (steps * batch * GROUP_SIZE)


def measure(workflow: str, episodes: int, rounds: int) -> Measured:
    """Alternately with and without the ledger; medians."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for ledger in (False, True):
            found[ledger].append(cpu_per_episode(workflow, episodes, ledger))
    without = median(found[False])
    return Measured(without, max(median(found[True]) - without, 0.0))


def loads(given: Given, measured: Measured) -> dict[str, Callable[[int], float]]:
    """By limit: how much of what it can do a fleet asks for. Above 1, engines wait for it."""

    def synced(transport: str, share: float = 1.0) -> Callable[[int], float]:
        return lambda engines: sync_seconds(given.fleet(engines, transport, share)) / given.step_s

    both_s = measured.controller_s + measured.ledger_s
    return {
        "controller and ledger, one process": lambda engines: given.episodes_per_s(engines) * both_s,
        "controller alone": lambda engines: given.episodes_per_s(engines) * measured.controller_s,
        "ledger alone": lambda engines: given.episodes_per_s(engines) * measured.ledger_s,
        "weight sync, direct": synced("direct"),
        "weight sync, shared file system": synced("file"),
        "weight sync, tree": synced("tree"),
        "weight sync, tree, a tenth of the weights": synced("tree", 0.1),
    }


def reached_at(load: Callable[[int], float]) -> int | None:
    """The first fleet that asks for all of it; None if not even the largest does."""
    low, high = 1, FLEETS[-1]
    if load(high) < 1:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if load(middle) >= 1 else (middle + 1, high)
    return low


def simulated(given: Given, engines: int, transport: str) -> dict[str, Any]:
    """The fleet on the virtual clock: asynchronous, one version ahead; a node is lost every 1,000 hours of its life."""
    group_s = given.tokens / given.tokens_per_s * TOGETHER  # episodes of an engine share its tokens per second
    batch = max(2, round(given.step_s * given.episodes_per_s(engines) / TOGETHER))
    config = build_config(
        {
            "rollout": {"group_size": TOGETHER, "max_concurrent": TOGETHER * engines},
            "trainer": {"batch_size": batch, "max_staleness": 1, "placement": "separate"},
            "simulate": {
                "group_s": group_s, "learn_s": given.step_s * 0.8, "steps": 4, "warmup": 1, "tokens": 2,
                "fleet": {**given.fleet(engines, transport).model_dump(), "mtbf_h": 1000.0},
            },
        },
        may_be_idle=True,
    )  # fmt: skip
    found = simulate(config)
    return {"engine busy": found.generation_busy, "sync_s": found.sync_s, "lost nodes": found.lost_nodes}


def draw(given: Given, measured: Measured, path: Path) -> None:
    """Load by fleet, both on logarithmic axes; the line at 1 is the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.4, 4.6), layout="constrained")
    colours = ("#0072B2", "#56B4E9", "#999999", "#D55E00", "#E69F00", "#009E73", "#CC79A7")
    for (name, load), colour in zip(loads(given, measured).items(), colours, strict=True):
        dashed = "--" if name.endswith("alone") else "-"
        axes.plot(FLEETS, [load(engines) for engines in FLEETS], dashed, color=colour, marker="o", ms=3, label=name)
    axes.axhline(1.0, color="#333333", linewidth=1)
    axes.text(8, 1.12, "limit: engines wait", fontsize=8, color="#333333")
    axes.set(xscale="log", yscale="log", xlabel="engines", ylabel="load (1 = all it can do)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=8_000, help="episodes of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workflow", choices=list(WORKFLOWS), default="1 turn")
    parser.add_argument("--tokens-per-s", type=float, default=2_500.0, help="of one engine")
    parser.add_argument("--tokens", type=int, default=1_000, help="of an episode")
    parser.add_argument("--weights-gb", type=float, default=16.0)
    parser.add_argument("--gbps", type=float, default=100.0, help="network of a node")
    parser.add_argument("--storage-gbps", type=float, default=400.0, help="shared file system, all readers together")
    parser.add_argument("--step-s", type=float, default=60.0, help="between two versions")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parsed(parser, {"episodes": 2_000, "rounds": 1})
    given = Given(args.tokens_per_s, args.tokens, args.weights_gb, args.gbps, args.storage_gbps, args.step_s)
    measured = measure(args.workflow, args.episodes, args.rounds)
    print(
        f"measured: {1e6 * measured.controller_s:.0f} µs of processor time per episode ({args.workflow}) for the "
        f"controller, {1e6 * measured.ledger_s:.0f} µs more for the ledger\n"
    )
    rows = []
    for name, load in loads(given, measured).items():
        at = reached_at(load)
        rows.append([name, f"{at:,}" if at else "above 10,000", *(f"{load(engines):.2g}" for engines in SHOWN)])
    print_table(["limit", "reached at (engines)", *(f"load at {engines:,}" for engines in SHOWN)], rows)
    fleets = SIMULATED[:2] if args.quick else SIMULATED
    runs = {(engines, way): simulated(given, engines, way) for engines in fleets for way in ("direct", "tree")}
    print()
    print_table(
        ["engines", "transport", "sync, s", "engines busy", "nodes lost"],
        [[f"{engines:,}", way, f"{found['sync_s']:.3g}", f"{found['engine busy']:.0%}", str(found["lost nodes"])]
         for (engines, way), found in runs.items()],
    )  # fmt: skip
    if args.plot:
        draw(given, measured, args.plot)
    if args.json:
        simulations = [{"engines": engines, "transport": way, **found} for (engines, way), found in runs.items()]
        found = {"given": asdict(given), "measured": asdict(measured), "simulated": simulations}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
