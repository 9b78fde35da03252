"""Does training through Tinker learn like the local backend? The same run, seeds and adapters with both.

    python benchmarks/tinker_learning.py [--seeds 0 1 2] [--json FILE] [--quick]

Trains examples/countdown_tinker.toml with backend "tinker", through a local server, and with backend "local" and LoRA.
Prints held-out pass@1 and rewards over the run as a Markdown table. Finished runs in --work are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import chdir
from pathlib import Path
from typing import Any

from tinker_equality import tinker_server

from headrace.config.loading import load_config
from headrace.trainer.trainer import UnifiedTrainer

ROOT = Path(__file__).parent.parent

RANK = 16
WAYS: dict[str, tuple[str, ...]] = {
    "local": ("--backend.name=local", "--tinker.rank=32", f"--model.lora.rank={RANK}"),  # 32: the section unset
    "tinker": (f"--tinker.rank={RANK}", "--tinker.train_unembed=false"),
    "tinker, one pass": (f"--tinker.rank={RANK}", "--tinker.train_unembed=false", "--trainer.stream=false"),
    "tinker, async": (f"--tinker.rank={RANK}", "--tinker.train_unembed=false", "--trainer.max_staleness=2"),
}


def curve(way: str, seed: int, work: Path, *extra: str) -> dict[str, list[float]]:
    """Held-out pass@1 and mean rewards of a run. A finished run in `work` is read instead of repeated."""
    run = work / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (run / "finished").exists():
        settings = [*WAYS[way], f"--run.dir={work}", f"--run.name={run.name}", f"--run.seed={seed}", *extra]
        with chdir(ROOT):
            UnifiedTrainer(load_config(ROOT / "examples" / "countdown_tinker.toml", settings)).fit()
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {"pass@1": "eval/countdown/pass@1", "reward": "reward/mean", "drift": "policy/kl_to_sampler"}
    return {name: [row[key] for row in rows if key in row] for name, key in keys.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/tinker_learning"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    extra, seeds, work = ((), args.seeds, args.work.resolve())
    if args.quick:
        extra = ("--trainer.steps=2", "--eval.every=0", "--eval.sets.countdown.args.count=20")
        seeds, work = [0], work / "quick"
    with tinker_server(work) as url:
        os.environ["TINKER_BASE_URL"], os.environ["TINKER_TELEMETRY"] = url, "0"
        found = {way: {seed: curve(way, seed, work, *extra) for seed in seeds} for way in WAYS}
    print("| way | seed | held-out pass@1 | first and last reward | KL to the sampler, mean |\n" + "| --- " * 5 + "|")
    for way, by_seed in found.items():
        for seed, one in by_seed.items():
            drift, rewards = one["drift"], one["reward"]
            solved = " → ".join(f"{value:.1%}" for value in one["pass@1"])
            mean = sum(drift) / max(len(drift), 1)
            print(f"| {way} | {seed} | {solved} | {rewards[0]:.2f} → {rewards[-1]:.2f} | {mean:.1e} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
