"""What does a step cost on a busy machine? The bundled model, with a background load on the same cores.

    python benchmarks/busy.py [--against DIR] [--busy 4] [--rounds 5] [--steps 12] [--json FILE] [--quick]

A round is a training run in its own process. It alternates between steps on the quiet machine and steps with `--busy`
processes that compute without end. With `--against`, the folder of another checkout, a run of its code follows each of
ours. Ratios are of medians within a round, so other work on the machine affects them less than seconds; for the
seconds, the machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ENVIRONMENT = dict(os.environ)  # as it was: importing headrace may add to it, and the other checkout must not see that

from _arguments import parsed  # noqa: E402
from _tables import print_table, spread  # noqa: E402

from headrace import Callback, UnifiedTrainer  # noqa: E402
from headrace.config import RunConfig  # noqa: E402

OURS, THEIRS = "this code", "the other"
WARM_UP = 3
TURNS = 2
LONGEST_S = 600
TARGETS = {"quiet / other checkout": 1.03, "busy / quiet": 3.0}
LOAD = """
import os, signal, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
os.kill(os.getpid(), signal.SIGSTOP)
while os.getppid() == parent and time.monotonic() < end:
    sum(range(20000))
"""


@dataclass
class Steps(Callback):
    """Notes how long steps take, and switches the load on and off between them."""

    steps: int
    load: list[subprocess.Popen[bytes]]
    taken: dict[str, list[float]] = field(default_factory=lambda: {"quiet": [], "busy": []})
    _made: int = 0
    _began: float = 0.0

    def on_batch_end(self, step: int, metrics: Mapping[str, float]) -> None:
        now, turn = time.perf_counter(), (self._made - WARM_UP) // self.steps
        first = (self._made - WARM_UP) % self.steps == 0  # of a turn: caches and the scheduler are still adapting
        if self._made >= WARM_UP and not first:
            self.taken["busy" if turn % 2 else "quiet"].append(now - self._began)
        self._made += 1
        if self._made > WARM_UP and (self._made - WARM_UP) % self.steps == 0:
            for process in self.load:
                process.send_signal(signal.SIGSTOP if turn % 2 else signal.SIGCONT)
            time.sleep(0.2)
        self._began = time.perf_counter()


@contextmanager
def background_load(processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that wait for SIGCONT. They are there before the run, whose threads may have other time slices."""
    command = [sys.executable, "-I", "-S", "-c", LOAD, str(LONGEST_S)]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(steps: int, busy: int) -> dict[str, list[float]]:
    """Seconds of steps, quiet and busy, with the checkout that is on the path."""
    with tempfile.TemporaryDirectory() as scratch, background_load(busy) as load:
        noted = Steps(steps, load)
        config = RunConfig.model_validate(
            {
                "run": {"dir": scratch},
                "data": {"tasks": "countdown", "args": {"count": 2000}},
                "workflow": {"name": "single_turn", "judger": "countdown"},
                "rollout": {"group_size": 8, "max_tokens": 100},
                "optimizer": {"lr": 1e-4},
                "trainer": {"steps": WARM_UP + 2 * TURNS * steps, "batch_size": 16, "save_last": False},
                "track": {"trackers": ["jsonl"], "plot": False},
            }
        )
        UnifiedTrainer(config, callbacks=[noted]).fit()
    return noted.taken


def run_checkout(checkout: Path, steps: int, busy: int) -> dict[str, list[float]]:
    """`measure` in a process that imports the checkout's code."""
    path = os.pathsep.join([str(checkout / "src"), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--measure", "--steps", str(steps), "--busy", str(busy)]
    done = subprocess.run(command, env=ENVIRONMENT | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: the run of {checkout} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not Path(found.pop("code")).is_relative_to(checkout / "src"):
        sys.exit(f"error: {checkout} was not what was measured; give the folder of a checkout, with src/headrace in it")
    return found


def ratios(rounds: Sequence[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Per side: of medians, one for each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in rounds[0]:
        at = [{key: median(values) for key, values in sides[name].items()} for sides in rounds]
        found[name] = {
            "quiet_s": [one["quiet"] for one in at],
            "busy_s": [one["busy"] for one in at],
            "busy / quiet": [one["busy"] / one["quiet"] for one in at],
        }
        if THEIRS in rounds[0]:
            found[name]["quiet / other checkout"] = [
                one["quiet"] / median(sides[THEIRS]["quiet"]) for one, sides in zip(at, rounds, strict=True)
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout to compare with")
    parser.add_argument("--busy", type=int, default=4, help="processes of the background load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps per phase; the first does not count")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parsed(parser, {"rounds": 1, "steps": 4})
    if given.measure:
        import headrace

        print(json.dumps(measure(given.steps, given.busy) | {"code": str(Path(headrace.__file__).resolve())}))
        return
    here = Path(__file__).resolve().parent.parent
    sides = {OURS: here} | ({THEIRS: given.against.resolve()} if given.against else {})
    rounds: list[dict[str, Any]] = []
    for number in range(given.rounds):
        print(f"round {number + 1} of {given.rounds} ...", file=sys.stderr, flush=True)
        rounds.append({name: run_checkout(folder, given.steps, given.busy) for name, folder in sides.items()})
    found = ratios(rounds)
    keys = list(next(iter(found.values())))
    print_table(["", *keys], [[name, *(spread(values[key], 3) for key in keys)] for name, values in found.items()])
    for key, most in TARGETS.items():
        if key in keys:
            print(f"{key}: {median(found[OURS][key]):.2f}; the target is at most {most}")
    if given.json:
        given.json.write_text(json.dumps({"busy": given.busy, "targets": TARGETS, "sides": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
