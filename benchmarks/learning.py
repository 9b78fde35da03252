"""Does it learn? Every recipe on the bundled model, three seeds each: held-out pass@1 before and after.

    python benchmarks/learning.py [RECIPE ...] [--seeds 0 1 2] [--json FILE] [--quick]

Prints a Markdown table. `--quick` uses one seed and a few steps. Finished runs in --work are not repeated.
"""

from __future__ import annotations

import argparse
import json
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from headrace.config.loading import load_config
from headrace.evaluation.evaluate import export_run
from headrace.trainer.trainer import UnifiedTrainer

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Recipe:
    """A run file with settings laid over it, and how many points it must gain in which evaluation set."""

    file: str
    settings: tuple[str, ...] = ()
    margin: float = 0.30
    evaluated: str = "countdown"


# Four updates per batch: with one, every ratio is 1 and these losses have the same gradient as ppo_clip.
OFF_POLICY = ("--trainer.updates_per_batch=4", "--trainer.steps=60", "--eval.every=20")
RECIPES = {
    "grpo": Recipe("countdown.toml"),
    "int8": Recipe("countdown.toml", ("--engine.weights=int8",)),
    "rloo": Recipe("countdown.toml", ("--algorithm.estimator=rloo",)),
    "ppo_clip": Recipe("countdown.toml", OFF_POLICY),
    "gspo": Recipe("countdown.toml", ("--algorithm.loss=gspo", *OFF_POLICY)),
    "cispo": Recipe("countdown.toml", ("--algorithm.loss=cispo", *OFF_POLICY)),
    "dppo_tv": Recipe("countdown.toml", ("--algorithm.loss=dppo_tv", *OFF_POLICY)),
    "distill": Recipe("countdown_distill.toml"),
    "self_distill": Recipe("self_distill.toml"),
    "dpo": Recipe("countdown_dpo.toml"),
    "echo": Recipe("echo.toml", evaluated="echo"),  # several turns
}


def run_recipe(name: str, seed: int, work: Path, *extra: str) -> tuple[float, float]:
    """Held-out pass@1 before and after. A finished run in `work` is read instead of repeated."""
    recipe = RECIPES[name]
    run = work / f"{name}-{seed}"
    if not (run / "finished").exists():
        settings = [*recipe.settings, f"--run.dir={work}", f"--run.name={run.name}", f"--run.seed={seed}", *extra]
        if name == "distill":
            settings.append(f"--distill.teacher={_teacher(work, *extra)}")
        with chdir(ROOT):  # where the run files say that they are started
            UnifiedTrainer(load_config(ROOT / "examples" / recipe.file, settings)).fit()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = f"eval/{recipe.evaluated}/pass@1"
    scores = [row[key] for row in rows if key in row]
    return scores[0], scores[-1]


def _teacher(work: Path, *extra: str) -> Path:
    """The model that the first grpo run trained."""
    folder = work / "teacher"
    if not folder.exists():
        run_recipe("grpo", 0, work, *extra)
        export_run(work / "grpo-0", folder)
    return folder


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/learning"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    extra, seeds, work = ((), args.seeds, args.work)
    if args.quick:
        extra, seeds, work = ("--trainer.steps=2", "--eval.every=0"), [0], args.work / "quick"
    table = {}
    for name in args.recipes:
        small = (f"--eval.sets.{RECIPES[name].evaluated}.args.count=20",) if args.quick else ()
        table[name] = {seed: run_recipe(name, seed, work.resolve(), *extra, *small) for seed in seeds}
    print("| recipe | " + " | ".join(f"seed {seed}" for seed in seeds) + " |")
    print("| --- |" + " --- |" * len(seeds))
    for name, scores in table.items():
        cells = (f"{before:.1%} → {after:.1%}" for before, after in scores.values())
        print(f"| {name} | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
