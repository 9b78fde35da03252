"""What does the ledger cost? Inserts per second, bytes per episode, time to open a large one, and its share of a run.

    python benchmarks/ledger_overhead.py [--episodes 1000000] [--processes 4] [--json FILE] [--quick]

Prints a Markdown table. Episodes are realistic: one to three calls in a conversation, prompts of 60 tokens and
replies of 40, groups of 8. Then runs with and without the ledger alternate: the countdown example, and one whose model
costs nothing, so that all its time is the controller's. `ratio` compares the median seconds per step of a run. The next
two compare the median and the minimum of each step over all runs. `cpu_ratio` compares CPU time. `tokens_*` are about
what the learner computed of trained tokens: bytes for each, and how long recording those of a step (128 rows of 500)
takes. `--quick` uses a fiftieth of the episodes, and one pair of short runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from headrace import Callback, UnifiedTrainer, load_config
from headrace.data.episode import Episode, ModelOutput, OwnedMessages, Step, Trajectory
from headrace.data.sample import LearnerValues, Sample, TrainBatch
from headrace.data.task import Message
from headrace.ledger import Ledger, LedgerReader

ROOT = Path(__file__).parent.parent
GROUP = 8
BATCH = 16  # groups
POOL = 200  # groups that are made up; recorded again and again under new ids
BURST = 10 * BATCH  # groups
DIGEST = "0123456789abcdef0123456789abcdef"
PROMPT, REPLY, QUESTION = 60, 40, 20  # tokens
WORDS = ("make", "from", "use", "each", "number", "once", "search", "answer", "plus", "times", "minus", "try", "then")
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 100, "stop": []}


@dataclass(frozen=True)
class Made:
    """An episode, and the replies that it was made of."""

    episode: Episode
    outputs: tuple[ModelOutput, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those of its only trajectory."""
        return self.episode.trajectories[0].steps


def record_run(ledger: Ledger, pool: Sequence[Sequence[Made]], group_ids: Iterable[int]) -> float:
    """Record groups out of a pool, all of them trained; seconds that the caller spent in the ledger."""
    spent_s = 0.0
    for group_id in group_ids:
        group = [replace(made.episode, group_id=group_id) for made in pool[group_id % len(pool)]]
        began = time.perf_counter()
        _record(ledger, group_id, group, pool[group_id % len(pool)])
        spent_s += time.perf_counter() - began
    return spent_s


def make_group(rng: random.Random) -> list[Made]:
    """Rollouts of one task."""
    prompt = tuple(rng.randrange(2000) for _ in range(PROMPT))
    task = {"role": "user", "content": _text(rng, PROMPT)}
    return [_make(rng, prompt, task, rollout) for rollout in range(GROUP)]


def _make(rng: random.Random, ids: tuple[int, ...], task: dict[str, str], rollout: int) -> Made:
    history: list[Message] = [task]
    outputs: list[ModelOutput] = []
    steps: list[Step] = []
    for call in range(rng.randint(1, 3)):
        if call:
            history = [*history, outputs[-1].message, {"role": "user", "content": _text(rng, QUESTION)}]
            ids = ids + outputs[-1].completion_ids + tuple(rng.randrange(2000) for _ in range(QUESTION))
        outputs.append(_output(rng, ids, call, version=rollout % 2))
        steps.append(Step.from_model_output(outputs[-1], OwnedMessages(history)))
    trajectory = Trajectory(tuple(steps), reward=float(rng.random() < 0.5))
    return Made(Episode("task", (trajectory,), rollout_idx=rollout, seed=rng.getrandbits(62)), tuple(outputs))


def _output(rng: random.Random, prompt: tuple[int, ...], call: int, version: int) -> ModelOutput:
    ids = tuple(rng.randrange(2000) for _ in range(REPLY))
    logprobs = struct.unpack(f"{REPLY}f", struct.pack(f"{REPLY}f", *(-rng.expovariate(2) for _ in ids)))
    text = _text(rng, REPLY)
    return ModelOutput(text, prompt, ids, logprobs, logprobs, (version,) * REPLY, content=text, call=call)


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


def _record(ledger: Ledger, group_id: int, episodes: Sequence[Episode], group: Sequence[Made]) -> None:
    step = group_id // BATCH
    ledger.dispatched(group_id, (0, group_id), "task", "default", GROUP, step)
    for episode, made in zip(episodes, group, strict=True):
        key = (group_id, episode.rollout_idx, 0)
        ledger.started(*key, episode.seed)
        for output, taken in zip(made.outputs, made.steps, strict=True):
            ledger.called(
                *key, output, role="agent", seed=output.call, request_digest=DIGEST, messages=taken.messages,
                params=PARAMS,
            )  # fmt: skip
        ledger.finished(episode, 1.0)
    ledger.decided(group_id, "whole")
    if group_id % BATCH == BATCH - 1:
        members = range(group_id - BATCH + 1, group_id + 1)
        ledger.batch(step, step, members)
        ledger.committed(step, 1)
        for member in members:
            ledger.decided(member, "trained", step=step, trained=GROUP)
        ledger.published(step + 1, f"{step:016x}", step + 1)


def measure(work: Path, episodes: int) -> dict[str, float]:
    """Record so many episodes, then open what was recorded and ask for the account."""
    rng = random.Random(0)
    pool = [make_group(rng) for _ in range(POOL)]
    began, busy = time.perf_counter(), time.process_time()
    with Ledger.open(work) as ledger:
        caller_s = record_run(ledger, pool, range(BURST))  # fewer events than may wait: nobody waits for the writer
        record_run(ledger, pool, range(BURST, episodes // GROUP))
        ledger.flush()
        took_s, busy_s = time.perf_counter() - began, time.process_time() - busy
    began = time.perf_counter()
    with LedgerReader.read(work) as reader:
        account = reader.account()
        opened_s = time.perf_counter() - began
        (rows,) = reader.rows("SELECT (SELECT count(*) FROM calls), (SELECT count(*) FROM episodes)")
    began = time.perf_counter()
    with Ledger.open(work) as ledger:
        ledger.account()
        went_on_s = time.perf_counter() - began
    return {
        "episodes": account.dispatched,
        "episodes_per_s": account.dispatched / took_s,
        "inserts_per_s": (rows[0] + 2 * rows[1]) / took_s,  # calls, episodes and their bodies
        "cpu_us_per_episode": 1e6 * busy_s / account.dispatched,
        "caller_us_per_episode": 1e6 * caller_s / (BURST * GROUP),
        "bytes_per_episode": (work / "ledger.sqlite").stat().st_size / account.dispatched,
        "open_and_account_s": opened_s,
        "open_for_writing_and_account_s": went_on_s,
    }


def measure_tokens(work: Path, row_tokens: int = 500, steps: int = 20) -> dict[str, float]:
    """What recording the learner's values costs: batches of GROUP × BATCH rows, with them and without."""
    rng = random.Random(0)
    batches = [_learned_batch(rng, row_tokens) for _ in range(2)]
    took_s, sizes = {True: [], False: []}, {}
    for number in range(2 * steps):
        with_values = bool(number % 2)
        folder = work / ("with" if with_values else "without")
        folder.mkdir(exist_ok=True)
        batch = batches[number // 2 % 2]
        given = batch if with_values else replace(batch, learned=None)
        with Ledger.open(folder) as ledger:
            began = time.perf_counter()
            ledger.batch(number // 2, 0, (), trained=[given])
            ledger._writer.wait(sync=False)  # as the update does
            took_s[with_values].append(time.perf_counter() - began)
        sizes[with_values] = (folder / "ledger.sqlite").stat().st_size
    tokens = GROUP * BATCH * row_tokens
    return {
        "tokens_per_step": tokens,
        "tokens_bytes_each": (sizes[True] - sizes[False]) / (steps * tokens),
        "tokens_ms_per_step": 1e3 * (median(took_s[True]) - median(took_s[False])),
        "tokens_us_each": 1e6 * (median(took_s[True]) - median(took_s[False])) / tokens,
    }


def _learned_batch(rng: random.Random, row_tokens: int) -> TrainBatch:
    """Log-probabilities and entropies as a model has them: most tokens are all but certain, some are not."""

    def single(value: float) -> float:
        return struct.unpack("f", struct.pack("f", value))[0]

    mask = (0,) * PROMPT + (1,) * row_tokens
    size, rows = len(mask), GROUP * BATCH
    row = Sample((1,) * (size + 1), mask, (0.0,) * size, (0,) * size, (0.5,) * size)
    columns = [[], [], []]
    for _ in range(rows):
        sure = [rng.random() < 0.6 for _ in range(row_tokens)]
        columns[0].append(tuple(single(-rng.expovariate(1e3 if one else 1)) for one in sure))
        columns[1].append(tuple(single(rng.expovariate(1e2 if one else 1)) for one in sure))
        columns[2].append(tuple(int(rng.random() < 0.01) for _ in sure))
    samples = tuple(replace(row, group_id=place // GROUP, rollout_idx=place % GROUP) for place in range(rows))
    return TrainBatch(samples, (1.0,) * rows, (), rows, learned=LearnerValues(*map(tuple, columns)))


# ---- with and without ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """What the steps of a run took."""

    steps_s: tuple[float, ...]
    cpu_s: float
    """Processor seconds of all its threads."""


class Watch(Callback):
    """Processor time of training, without start-up."""

    def on_train_start(self, trainer: Any) -> None:
        self._began_s = time.process_time()

    def on_train_end(self, trainer: Any) -> None:
        self.cpu_s = time.process_time() - self._began_s


def train(kind: str, enabled: bool, steps: int, folder: Path) -> Spent:
    """A run in this process: "countdown" is the example, "controller" one whose model costs nothing."""
    watch = Watch()
    if kind == "countdown":
        settings = [f"--trainer.steps={steps}", f"--ledger.enabled={str(enabled).lower()}", f"--run.dir={folder}",
                    "--eval.sets={}", "--eval.every=0", "--trainer.save_last=false",
                    "--track.trackers", '["jsonl"]', "--track.plot=false"]  # fmt: skip
        trainer = UnifiedTrainer(load_config(ROOT / "examples" / "countdown.toml", settings), callbacks=[watch])
    else:
        from null_backend import Null, null_trainer, scattered, some_tasks

        trainer = null_trainer(
            folder, scattered, some_tasks(1000), null=Null(checks=False, remembers=False), callbacks=[watch],
            trainer={"steps": steps, "batch_size": 32, "save_last": False}, ledger={"enabled": enabled},
            rollout={"group_size": GROUP, "max_concurrent": 256, "max_tokens": 8},
        )  # fmt: skip
    with redirect_stdout(StringIO()):
        run_dir = trainer.fit().run_dir
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Spent(tuple(row["time/step_s"] for row in rows if row["step"]), watch.cpu_s)


def compare(kind: str, steps: int, processes: int, rounds: int) -> dict[str, float]:
    """Runs with and without in turns, a few of them per process; a step is the same work in all of them."""
    spent: dict[bool, list[Spent]] = {True: [], False: []}
    for number in range(processes):
        command = [sys.executable, __file__, "--train", kind, str(steps), str(rounds), str(number % 2)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        for enabled, runs in enumerate(json.loads(done.stdout)):
            spent[bool(enabled)] += [Spent(**run) for run in runs]
    ratios = {
        "ratio": _ratio(spent, lambda runs: median(sum(run.steps_s) for run in runs)),
        "ratio_of_median_steps": _ratio(spent, lambda runs: sum(map(median, _by_step(runs)))),
        "ratio_of_best_steps": _ratio(spent, lambda runs: sum(map(min, _by_step(runs)))),
        "cpu_ratio": _ratio(spent, lambda runs: median(run.cpu_s for run in runs)),
    }
    seconds = {"s_per_step": median(t for run in spent[False] for t in run.steps_s), "runs": len(spent[True])}
    return {f"{kind}_{name}": value for name, value in (seconds | ratios).items()}


def _by_step(runs: Sequence[Spent]) -> Iterable[tuple[float, ...]]:
    return zip(*(run.steps_s for run in runs), strict=True)


def _ratio(spent: dict[bool, list[Spent]], metric: Callable[[Sequence[Spent]], float]) -> float:
    return metric(spent[True]) / metric(spent[False])


def alternate(kind: str, steps: int, rounds: int, first: bool) -> list[list[Spent]]:
    """Runs without, and runs with the ledger."""
    spent: list[list[Spent]] = [[], []]
    with tempfile.TemporaryDirectory() as work:
        train(kind, first, 1, Path(work, "warm-up"))
        for number in range(2 * rounds):
            enabled = first ^ bool((number + 1) // 2 % 2)  # each comes after the other as often as after itself
            spent[enabled].append(train(kind, enabled, steps, Path(work, str(number))))
    return spent


def main() -> None:
    """Run and print."""
    if sys.argv[1:2] == ["--train"]:
        kind, *numbers = sys.argv[2:]
        steps, rounds, first = map(int, numbers)
        print(json.dumps([[asdict(run) for run in runs] for runs in alternate(kind, steps, rounds, bool(first))]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=4, help="each does 3 runs with and 3 without")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="headrace-ledger-"))
    try:
        metrics = measure(work, args.episodes // (50 if args.quick else 1))
        metrics |= measure_tokens(work)
    finally:
        shutil.rmtree(work)
    metrics |= compare("countdown", *((2, 1, 1) if args.quick else (8, args.processes, 3)))
    metrics |= compare("controller", *((10, 1, 1) if args.quick else (30, args.processes, 3)))
    print("| metric | value |\n| --- | --- |")
    for name, value in metrics.items():
        print(f"| {name} | {value:,.3f} |" if value < 10 else f"| {name} | {value:,.0f} |")
    if args.json:
        args.json.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
