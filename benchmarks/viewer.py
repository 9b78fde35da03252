"""How fast is the viewer? Every page over a ledger of a million episodes, its memory, and what watching costs a run.

    python benchmarks/viewer.py [--episodes 1000000] [--rounds 40] [--run DIR] [--json FILE] [--quick]

Makes the ledger (`--run` keeps it, or takes one that was made before), starts `headrace view` on it in a process of its
own, and asks for every page at random places; `first_page` is the list of runs and the run, asked for once in a process
that has seen nothing. Then a ledger is written at full speed, in turns of a few seconds with and without five viewers
that watch the run from a process of their own: each asks for the run, its curves and the newest step, group and episode
every second. `slowdown` is how much longer an episode takes with them (medians of the turns). `--watching-only`
leaves the first part out. `--quick`: 20,000 episodes, few rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _arguments import parsed
from _large_run import GROUP, make_large_run, record_steps

from headrace.ledger import Ledger, LedgerReader

VIEWERS = 5
TURN_S = 4.0


@contextmanager
def viewing(folder: Path) -> Iterator[tuple[int, int]]:
    """`headrace view` in a process of its own: its port and its process id."""
    command = [sys.executable, "-m", "headrace", "view", str(folder), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[^ ]*:(\d+)/", line)
        if found is None:
            raise SystemExit(f"headrace view did not start: {line}")
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.wait()


def ask(connection: HTTPConnection, path: str) -> tuple[float, bytes]:
    """Seconds that an answer took, and the answer."""
    began = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise SystemExit(f"{path} gave {answer.status}: {body[:200]!r}")
    return time.perf_counter() - began, body


def pages(run: str, facts: dict[str, int], rng: random.Random) -> dict[str, str]:
    """Every page, at random places."""
    base, group, step = f"/api/runs/{run}", rng.randrange(facts["groups"]), 1 + rng.randrange(facts["steps"])
    at = rng.uniform(facts["began"], facts["ended"])
    words = ("make", "search plus", "nothing like this is there")
    return {
        "runs": "/api/runs",
        "run": base,
        "metrics": f"{base}/metrics?points=800",
        "account": f"{base}/account",
        "steps": f"{base}/steps?before={step + 100}",
        "step": f"{base}/steps/{step}",
        "group": f"{base}/groups/{group}",
        "episode": f"{base}/groups/{group}/rollouts/{rng.randrange(GROUP)}",
        "facets": f"{base}/facets",
        "search_filter": f"{base}/episodes?{rng.choice(('state=failed', 'reward_min=1', 'termination=timeout'))}",
        "search_text": f"{base}/episodes?text={rng.choice(words).replace(' ', '+')}",
        "timeline": f"{base}/timeline?start={at:.1f}&end={at + 60:.1f}",
        "compare_steps": f"/api/compare?a={run}@{step}&b={run}@{max(1, step - 20)}-{step}",
        "evaluated": f"{base}/evaluated/{1 + rng.randrange(facts['evaluated'])}",
    }


def memory_mb(pid: int) -> float:
    """What a process holds now."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_pages(run_dir: Path, rounds: int) -> dict[str, float]:
    """Times of every page, and the memory of the viewer."""
    rng, found = random.Random(0), dict[str, float]()
    with LedgerReader.read(run_dir) as reader:
        facts = {"groups": (reader.last_group_id() or 0) + 1, "steps": reader.batch_count()}
        ((began, ended),) = reader.rows("SELECT min(recorded_at), max(recorded_at) FROM batches")
        facts |= {"began": int(began), "ended": int(ended)}
        facts["evaluated"] = reader.rows("SELECT max(eval_episode_id) FROM eval_episodes")[0][0] or 1
    with viewing(run_dir.parent) as (port, pid):
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        first = [ask(connection, path)[0] for path in ("/", "/api/runs", f"/api/runs/{run_dir.name}")]
        found["first_page_s"] = sum(first)
        times: dict[str, list[float]] = {}
        for number in range(rounds):
            for name, path in pages(run_dir.name, facts, rng).items():
                times.setdefault(name, []).append(ask(connection, path)[0])
            if number == rounds // 4:
                found["memory_mb_after_a_quarter"] = memory_mb(pid)
        found["memory_mb_at_the_end"] = memory_mb(pid)
    for name, took in times.items():
        ordered = sorted(took)
        found[f"{name}_p50_ms"] = 1e3 * median(took)
        found[f"{name}_p95_ms"] = 1e3 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    every = sorted(one for took in times.values() for one in took)
    found["any_page_p95_ms"] = 1e3 * every[int(0.95 * len(every))]
    return found


# ---- what watching costs ---------------------------------------------------------------------------------------------


def watch(port: int, run: str, on: Any, over: Any, asked: Any) -> None:
    """Five people who watch while `on` is set: in a process of their own, as browsers are, and behind everything."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # browsers are on other machines
    base = f"/api/runs/{run}"

    def one() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        while on.wait() and not over.is_set():
            for path in (base, f"{base}/metrics?points=400", f"{base}/steps?limit=20"):
                _, body = ask(connection, path)
            count = 3
            if steps := json.loads(body)["steps"]:
                _, body = ask(connection, f"{base}/steps/{steps[0]['step']}")
                group = json.loads(body)["groups"][0]["group_id"]
                ask(connection, f"{base}/groups/{group}")
                ask(connection, f"{base}/groups/{group}/rollouts/0")
                count += 3
            with asked.get_lock():
                asked.value += count
            time.sleep(1.0)

    threads = [threading.Thread(target=one) for _ in range(VIEWERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_watching(folder: Path, turns: int) -> dict[str, float]:
    """Write at full speed, with and without viewers in turns; microseconds per episode."""
    run_dir = folder / "written"
    run_dir.mkdir()
    took: dict[bool, list[float]] = {True: [], False: []}
    with Ledger.open(run_dir) as ledger, (run_dir / "metrics.jsonl").open("w") as metrics:
        steps = record_steps(ledger)

        def write(seconds: float) -> float:
            """Seconds per episode."""
            began, first, last = time.perf_counter(), None, 0
            while time.perf_counter() - began < seconds:
                last, row = next(steps)
                first = last if first is None else first
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()
            ledger._writer.wait(sync=False)
            return (time.perf_counter() - began) / max(1, last - (first or 0))

        write(TURN_S)
        with viewing(folder) as (port, _):
            spawn = get_context("spawn")
            on, over, asked = spawn.Event(), spawn.Event(), spawn.Value("i", 0)
            watchers = spawn.Process(target=watch, args=(port, run_dir.name, on, over, asked))
            watchers.start()
            for turn in range(2 * turns):
                watched = turn % 4 in (1, 2)  # each comes after the other as often as after itself
                on.set() if watched else on.clear()
                time.sleep(1.0)
                took[watched].append(write(TURN_S))
            over.set()
            on.set()
            watchers.join()
    return {
        "written_us_per_episode": 1e6 * median(took[False]),
        "watched_us_per_episode": 1e6 * median(took[True]),
        "slowdown": median(took[True]) / median(took[False]),
        "pages_asked_while_writing": asked.value,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=40, help="of all pages")
    parser.add_argument("--turns", type=int, default=6, help="with viewers, and as many without")
    parser.add_argument("--run", type=Path, help="run folder to make, or to take if it is there")
    parser.add_argument("--watching-only", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parsed(parser, quick={"episodes": 20_000, "rounds": 5, "turns": 1})
    with tempfile.TemporaryDirectory(prefix="headrace-viewer-") as work:
        run_dir = args.run or Path(work) / "runs" / "large"
        if not args.watching_only and not (run_dir / "finished").exists():
            make_large_run(run_dir, args.episodes, _progress(args.episodes))
        found: dict[str, Any] = {"episodes": args.episodes}
        if not args.watching_only:
            found |= measure_pages(run_dir, args.rounds)
        found |= measure_watching(Path(work), args.turns)
    print("| metric | value |\n| --- | --- |")
    for name, value in found.items():
        print(f"| {name} | {value:,.3f} |" if value < 10 else f"| {name} | {value:,.0f} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def _progress(episodes: int) -> Callable[[int], None]:
    """A line for every tenth."""
    reported = 0

    def report(made: int) -> None:
        nonlocal reported
        if made * 10 // episodes > reported:
            reported = made * 10 // episodes
            print(f"recorded {made:,} episodes", file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    main()
