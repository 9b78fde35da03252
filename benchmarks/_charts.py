"""The charts of docs/performance.md and docs/results.md, from the results of benchmarks and runs.

python benchmarks/_charts.py --trl vs_trl.json --engine engine.json --runs runs/arithmetic_smollm2* --out docs/images
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"Headrace": "#1b6ca8", "TRL": "#b9b9b9", "TRL, no checkpointing": "#dddddd"}


def draw_trl(found: dict[str, Any], path: Path) -> None:
    """Seconds per step and peak memory per model, relative to TRL with its defaults."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, key, title in zip(
        axes, ("seconds per step", "peak memory (MB)"), ("time of a step", "peak memory"), strict=True
    ):
        for position, metrics in enumerate(found.values()):
            medians = metrics["medians"][key]
            for number, (side, value) in enumerate(reversed(medians.items())):
                share, at = value / medians["TRL"], position + 0.27 * (number - 1)
                axis.bar(at, share, 0.25, color=COLOURS[side], label=None if position else side)
                if side == "Headrace":
                    axis.annotate(f"{1 / share:.1f}× less", (at, share), ha="center", va="bottom", fontsize=9)
        axis.set_xticks(range(len(found)), list(found))
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("TRL = 1")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_engine(found: dict[str, Any], path: Path) -> None:
    """Decoding: tokens/s over the others', and the share of the roof, by batch."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    batches = [int(batch) for batch in found["batches"]]
    rows = [at["summary"]["decode"] for at in found["batches"].values()]
    for name, label in (("dynamic", "transformers, dynamic cache"), ("static", "static cache"), ("vllm", "vLLM")):
        if all(name in row["times"] for row in rows):
            left.plot(batches, [row["times"][name][0] for row in rows], "o-", label=label)
    left.axhline(1, color="#888", lw=0.8)
    left.set_title("decoding, times as fast as", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    for what in ("decode", "prefill"):
        shares = [at["summary"][what]["share_of_roof"] for at in found["batches"].values()]
        right.plot(batches, shares, "o-", label=what)
    right.axhline(0.6, color="#888", lw=0.8, ls="--")
    right.set_title("share of the machine's roof", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_xlabel("batch")
        axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run_of(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configuration and the metrics of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "config.json").read_text()), rows


def draw_runs(folders: Sequence[Path], path: Path) -> None:
    """Held-out pass@1 over the steps, a line for each run; asynchronous ones are dashed."""
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for folder in folders:
        config, rows = run_of(folder)
        points = [(row["eval/step"], row["eval/sums/pass@1"]) for row in rows if "eval/sums/pass@1" in row]
        ahead, seed = config["trainer"]["max_staleness"] > 0, config["run"]["seed"]
        label = f"{'asynchronous' if ahead else 'synchronous'}, seed {seed}"
        axis.plot(
            *zip(*points, strict=True), marker="o", ms=3, ls="--" if ahead else "-", color=f"C{seed}", label=label
        )
    axis.set_xlabel("step")
    axis.set_ylabel("held-out pass@1")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_engines(folders: Sequence[Path], path: Path) -> None:
    """Held-out pass@1 and the mean reward over the steps, a colour for each engine; asynchronous runs are dashed,
    and seeds after the first paler."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    colours: dict[str, str] = {}
    for folder in folders:
        config, rows = run_of(folder)
        engine, ahead = config["engine"], config["trainer"]["max_staleness"] > 0
        name = "torch" if engine["name"] == "torch" else f"{engine['name']}, {engine['replicas']} replicas"
        name = name.replace("1 replicas", "1 server").replace("replicas", "servers")
        seed = config["run"]["seed"]
        style: dict[str, Any] = {"ls": "--" if ahead else "-", "color": colours.setdefault(name, f"C{len(colours)}")}
        style["alpha"] = 1 / (1 + seed)
        label = f"{name}, {'max_staleness 2' if ahead else 'synchronous'}, seed {seed}"
        points = [(row["eval/step"], row["eval/sums/pass@1"]) for row in rows if "eval/sums/pass@1" in row]
        rewards = [(row["step"], row["reward/mean"]) for row in rows if row["step"]]
        left.plot(*zip(*points, strict=True), marker="o", ms=3, label=label, **style)
        right.plot(*zip(*rewards, strict=True), lw=1, **style)
    for axis, title in ((left, "held-out pass@1"), (right, "mean reward of the rollouts")):
        axis.set_xlabel("step")
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl", type=Path, help="JSON of vs_trl.py")
    parser.add_argument("--engine", type=Path, help="JSON of engine.py")
    parser.add_argument("--runs", type=Path, nargs="+", help="run folders of examples/arithmetic_smollm2.toml")
    parser.add_argument("--engines", type=Path, nargs="+", help="the same with different engines")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for source, name, draw in ((given.trl, "vs_trl.png", draw_trl), (given.engine, "engine.png", draw_engine)):
        if source:
            draw(json.loads(source.read_text()), given.out / name)
            print(given.out / name)
    for folders, name, draw in (
        (given.runs, "arithmetic_seeds.png", draw_runs), (given.engines, "arithmetic_engines.png", draw_engines),
    ):  # fmt: skip
        if folders:
            draw(folders, given.out / name)
            print(given.out / name)


if __name__ == "__main__":
    main()
