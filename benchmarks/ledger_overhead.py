"""What does the ledger cost? Inserts per second, bytes per episode, and how fast a large one opens.

    python benchmarks/ledger_overhead.py [--episodes 1000000] [--json FILE] [--quick]

Prints a table in Markdown. Episodes are realistic: one to three calls in a conversation, prompts of 60 tokens and
replies of 40, groups of 8. `--quick` takes a fiftieth of the episodes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.data.episode import Episode, ModelOutput, OwnedMessages, Step, Trajectory
from headrace.data.ledger import Ledger, LedgerReader, digest

GROUP = 8
BATCH = 16  # groups
PROMPT, REPLY, QUESTION = 60, 40, 20  # tokens
WORDS = ("make", "from", "use", "each", "number", "once", "search", "answer", "plus", "times", "minus", "try", "then")
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 100, "stop": []}


def run(ledger: Ledger, groups: int, seed: int = 0) -> float:
    """Record a run of so many groups, all trained; seconds on the caller's thread that were spent in the ledger."""
    rng = random.Random(seed)
    spent_s = 0.0
    for group_id in range(groups):
        made = list(_group(rng, group_id, version=group_id // BATCH))
        began = time.perf_counter()
        _record(ledger, group_id, made)
        spent_s += time.perf_counter() - began
    return spent_s


def _group(rng: random.Random, group_id: int, version: int) -> Iterator[tuple[Episode, list[ModelOutput], list]]:
    prompt = tuple(rng.randrange(2000) for _ in range(PROMPT))
    task = {"role": "user", "content": _text(rng, PROMPT)}
    for rollout in range(GROUP):
        history, ids, steps, outputs = [task], prompt, [], []
        for call in range(rng.randint(1, 3)):
            if call:
                history = [*history, outputs[-1].message, {"role": "user", "content": _text(rng, QUESTION)}]
                ids = ids + outputs[-1].completion_ids + tuple(rng.randrange(2000) for _ in range(QUESTION))
            outputs.append(_output(rng, ids, call, version))
            steps.append(Step.from_model_output(outputs[-1], OwnedMessages(history)))
        trajectory = Trajectory(tuple(steps), reward=float(rng.random() < 0.5))
        yield Episode(f"task {group_id}", (trajectory,), group_id, rollout, seed=rng.getrandbits(62)), outputs, steps


def _output(rng: random.Random, prompt: tuple[int, ...], call: int, version: int) -> ModelOutput:
    ids = tuple(rng.randrange(2000) for _ in range(REPLY))
    logprobs = struct.unpack(f"{REPLY}f", struct.pack(f"{REPLY}f", *(-rng.expovariate(2) for _ in ids)))
    text = _text(rng, REPLY)
    return ModelOutput(text, prompt, ids, logprobs, logprobs, (version,) * REPLY, content=text, call=call)


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(tokens))


def _record(ledger: Ledger, group_id: int, made: list[tuple[Episode, list[ModelOutput], list]]) -> None:
    step = group_id // BATCH
    ledger.dispatched(group_id, (0, group_id), f"task {group_id}", "default", GROUP, step)
    for episode, outputs, steps in made:
        place = (group_id, episode.rollout_idx, 0)
        ledger.started(*place, episode.seed)
        for output, taken in zip(outputs, steps, strict=True):
            asked = digest(output.call, len(output.prompt_ids))
            ledger.called(
                *place, output, role="agent", seed=output.call, request_digest=asked, messages=taken.messages,
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
    began = time.perf_counter()
    with Ledger.open(work) as ledger:
        caller_s = run(ledger, episodes // GROUP)
        ledger.flush()
        took_s = time.perf_counter() - began
    began = time.perf_counter()
    with LedgerReader.read(work) as reader:
        account = reader.account()
        opened_s = time.perf_counter() - began
    assert account.dispatched == episodes // GROUP * GROUP
    size = (work / "ledger.sqlite").stat().st_size
    began = time.perf_counter()
    with Ledger.open(work) as ledger:
        ledger.account()
        went_on_s = time.perf_counter() - began
    return {
        "episodes": account.dispatched,
        "episodes_per_s": account.dispatched / took_s,
        "caller_us_per_episode": 1e6 * caller_s / account.dispatched,
        "bytes_per_episode": size / account.dispatched,
        "open_and_account_s": opened_s,
        "open_for_writing_and_account_s": went_on_s,
    }


# ---- with and without: the ratio of a run's wall-clock goes here, and into the table ---------------------------------


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="headrace-ledger-"))
    try:
        figures = measure(work, args.episodes // (50 if args.quick else 1))
    finally:
        shutil.rmtree(work)
    print("| figure | value |\n| --- | --- |")
    for name, value in figures.items():
        print(f"| {name} | {value:,.3f} |" if value < 10 else f"| {name} | {value:,.0f} |")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
