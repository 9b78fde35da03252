"""How many generated, untrained tokens does a `kill -9` cost? On the long-tail workload.

    python benchmarks/crash_reuse.py [--kills 5] [--steps 16] [--seed 0] [--json FILE] [--quick]

A run of examples/long_tail_async.toml is killed at a random moment and resumed to its end. `generated` counts the
tokens that the engine had sampled for groups that were not trained by then, including unfinished replies. `reused`
counts those of them that were trained in the end, as recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace import Callback, UnifiedTrainer, load_config

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples" / "long_tail_async.toml"
SETTINGS = (
    f"--workflow.name={ROOT / 'examples' / 'long_tail.py'}:LongTail",
    "--eval.sets={}", "--track.trackers", '["jsonl"]', "--track.plot=false",
)  # fmt: skip
_UNFINISHED = "state IN ('dispatched', 'whole')"


@dataclass(frozen=True)
class Reuse:
    """What a kill cost."""

    step: int
    groups: int
    """Running, or complete and not trained."""
    generated: int
    recorded: int
    reused: int

    @property
    def share(self) -> float:
        """Of the tokens that were generated for these groups, those that were not generated again."""
        return self.reused / self.generated


class Counting(Callback):
    """On SIGUSR1, notes what the engine has generated, and dies."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def on_train_start(self, trainer: Any) -> None:
        def die(*_: Any) -> None:
            self._note.write_text(json.dumps({"step": trainer.step, **asdict(trainer.engine.health())}))
            os.kill(os.getpid(), signal.SIGKILL)

        signal.signal(signal.SIGUSR1, die)


def measure(run_dir: Path, kill_at: float, *settings: str) -> Reuse:
    """Kill a run after a number of steps (and a share of the next one), and resume it."""
    command = [sys.executable, __file__, "--life", str(run_dir), *SETTINGS, *settings]
    _killed(subprocess.Popen(command, stdout=subprocess.DEVNULL), run_dir, kill_at)
    note = json.loads(run_dir.with_suffix(".note").read_text())
    groups = [group for (group,) in _rows(run_dir, f"SELECT group_id FROM groups WHERE {_UNFINISHED}")]
    in_unfinished = f"FROM calls JOIN episodes USING (episode_id) WHERE group_id IN ({', '.join(map(str, groups))})"
    calls, recorded = _rows(run_dir, f"SELECT max(call_id), coalesce(sum(completion_tokens), 0) {in_unfinished}")[0]
    ((done,),) = _rows(
        run_dir,
        "SELECT coalesce(sum(completion_tokens), 0) FROM calls JOIN episodes USING (episode_id) "
        f"JOIN groups g USING (group_id) WHERE NOT g.{_UNFINISHED}",
    )
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ((reused,),) = _rows(
        run_dir,
        f"SELECT coalesce(sum(completion_tokens), 0) {in_unfinished} AND call_id <= {calls or 0} "
        "AND state = 'finished' AND group_id IN (SELECT group_id FROM groups WHERE state = 'trained')",
    )
    return Reuse(note["step"], len(groups), note["generated_tokens"] - done, recorded, reused)


def _killed(process: subprocess.Popen[bytes], run_dir: Path, kill_at: float) -> None:
    """Watches a run's metrics, and kills it."""
    seen: list[float] = [time.monotonic()]
    while len(seen) <= kill_at and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        made = len(path.read_text().splitlines()) if path.exists() else 0
        seen += [time.monotonic()] * (made + 1 - len(seen))
        time.sleep(0.005)
    time.sleep(kill_at % 1 * (seen[-1] - seen[1]) / max(len(seen) - 2, 1))
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == -signal.SIGKILL


def _rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    kills, steps = (1, 8) if args.quick else (args.kills, args.steps)
    rng = random.Random(args.seed)
    found: list[Reuse] = []
    print("| killed after step | groups not trained | tokens generated for them | recorded | reused | share |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as work:
        for number in range(kills):
            kill_at = rng.uniform(2.0, steps - 5.0)  # what is under way then is trained before the end
            found.append(one := measure(Path(work, str(number)), kill_at, f"--trainer.steps={steps}"))
            print(f"| {one.step} | {one.groups} | {one.generated} | {one.recorded} | {one.reused} | {one.share:.1%} |")
    total = sum(one.reused for one in found) / sum(one.generated for one in found)
    print(f"\nreused: {total:.1%} of the tokens that were generated and not trained")
    if args.json:
        args.json.write_text(json.dumps([{**asdict(one), "share": one.share} for one in found], indent=2) + "\n")


def live(run_dir: Path, settings: list[str]) -> None:
    """One life of the run: `--life RUN_DIR SETTING…`."""
    folder = [f"--run.dir={run_dir.parent}", f"--run.name={run_dir.name}"]
    UnifiedTrainer(load_config(FILE, [*settings, *folder]), callbacks=[Counting(run_dir.with_suffix(".note"))]).fit()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--life"]:
        live(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
