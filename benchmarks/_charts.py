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


def draw_runs(folders: Sequence[Path], path: Path) -> None:
    """Held-out pass@1 over the steps, a line for each run; asynchronous ones are dashed."""
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        points = [(row["eval/step"], row["eval/sums/pass@1"]) for row in rows if "eval/sums/pass@1" in row]
        separate, seed = config["trainer"]["placement"] == "separate", config["run"]["seed"]
        label = f"{'asynchronous' if separate else 'synchronous'}, seed {seed}"
        axis.plot(
            *zip(*points, strict=True), marker="o", ms=3, ls="--" if separate else "-", color=f"C{seed}", label=label
        )
    axis.set_xlabel("step")
    axis.set_ylabel("held-out pass@1")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl", type=Path, help="JSON of vs_trl.py")
    parser.add_argument("--engine", type=Path, help="JSON of engine.py")
    parser.add_argument("--runs", type=Path, nargs="+", help="run folders of examples/arithmetic_smollm2.toml")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for source, name, draw in ((given.trl, "vs_trl.png", draw_trl), (given.engine, "engine.png", draw_engine)):
        if source:
            draw(json.loads(source.read_text()), given.out / name)
            print(given.out / name)
    if given.runs:
        draw_runs(given.runs, given.out / "arithmetic_seeds.png")
        print(given.out / "arithmetic_seeds.png")


if __name__ == "__main__":
    main()
