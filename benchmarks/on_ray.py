"""Does a run learn on a cluster as it does on one machine? Two ranks, two engine replicas, two Ray nodes.

    python benchmarks/on_ray.py [--tasks countdown arithmetic] [--engines here torch vllm] [--staleness 0 2]
                                [--steps 30] [--set backend.micro_batch_tokens=1024 ...] [--runs FOLDER]
                                [--vllm-python PYTHON] [--json FILE] [--quick]

Starts two Ray nodes on this machine. Trains the run files examples/countdown.toml and examples/arithmetic_smollm2.toml,
as they are (`here`), and with the overlay benchmarks/two_raylets.toml: by each engine, synchronous (staleness 0) and
asynchronous. `--set` changes settings of all of them. Prints a Markdown table: the score of the evaluation set before,
the best on the way, and after; steps, and minutes. A run that was stopped resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _arguments import parsed
from _environments import environment, with_module
from _tables import print_table

ROOT = Path(__file__).parent.parent
TASKS = {"countdown": "countdown.toml", "arithmetic": "arithmetic_smollm2.toml"}
OVERLAY = ROOT / "benchmarks" / "two_raylets.toml"


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of one run: scores by step."""

    task: str
    where: str
    staleness: int
    scores: dict[int, float]
    steps: int
    minutes: float


@contextmanager
def two_raylets(memory_mb: int = 400) -> Iterator[str]:
    """The address of a cluster with two nodes, which ends with the program."""
    try:
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]
    except ImportError:
        sys.exit('Ray is not installed: pip install -e ".[ray]" -c constraints.txt')
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    each: dict[str, Any] = {"num_cpus": 4, "object_store_memory": memory_mb * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    nodes.add_node(**each)
    nodes.wait_for_nodes()
    try:
        yield str(nodes.address)
    finally:
        nodes.shutdown()


def train(task: str, where: str, staleness: int, options: list[str], folder: Path) -> Learned:
    """Run it as one would by hand. What it prints goes to a file beside the run."""
    name = f"{task}_{where}_{staleness}"
    files = [str(ROOT / "examples" / TASKS[task]), *([str(OVERLAY)] if where != "here" else [])]
    given = [f"--run.name={name}", f"--run.dir={folder}", f"--trainer.max_staleness={staleness}", *options]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    with (folder / f"{name}.txt").open("w") as output:
        command = [sys.executable, "-m", "headrace", "train", *files, *given]
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        sys.exit(f"{name} ended with exit code {code}; see {output.name}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    scores = {int(row["step"]): row[key] for row in rows for key in row if key.endswith("/pass@1")}
    steps = max(int(row["step"]) for row in rows)
    return Learned(task, where, staleness, scores, steps, (time.monotonic() - began) / 60)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--engines", nargs="+", choices=["here", "torch", "vllm"], default=["here", "torch", "vllm"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--steps", type=int, help="fewer than the run file has")
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="settings of every run")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "on_ray")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    return parsed(parser, {"tasks": ["countdown"], "engines": ["here", "torch"], "staleness": [0], "steps": 2})


def main() -> None:
    given = arguments()
    settings = [*([f"trainer.steps={given.steps}"] if given.steps else []), *given.set]
    common = [f"--{setting}" for setting in settings]
    named = {"torch": [], "vllm": ["--engine.name=vllm"]}
    if "vllm" in given.engines:
        python = given.vllm_python
        python = with_module(python, "vllm", "--vllm-python") if python else environment("vllm", "--vllm-python", True)
        named["vllm"].append(f"--engine.python={python}")
    found: list[Learned] = []
    with two_raylets() as address:
        for task in given.tasks:
            if "here" in given.engines:
                found.append(train(task, "here", 0, common, given.runs))
            for engine in [one for one in given.engines if one != "here"]:
                for staleness in given.staleness:
                    options = [f"--cluster.address={address}", *named[engine], *common]
                    found.append(train(task, engine, staleness, options, given.runs))
    heads = ["task", "engines", "staleness", "before", "best", "after", "steps", "minutes"]
    print_table(heads, [row(one) for one in found])
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


def row(one: Learned) -> list[str]:
    scores = list(one.scores.values()) or [float("nan")]
    where = "in the learner's process" if one.where == "here" else f"2 × {one.where} on two nodes, 2 ranks"
    shown = [f"{value:.3f}" for value in (scores[0], max(scores), scores[-1])]
    return [one.task, where, str(one.staleness), *shown, str(one.steps), f"{one.minutes:.1f}"]


if __name__ == "__main__":
    main()
