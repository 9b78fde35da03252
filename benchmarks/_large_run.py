"""A run folder with as many episodes as one likes, recorded through the ledger itself, as a run of months leaves it."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from headrace.config import RunConfig
from headrace.data.episode import Episode, ModelOutput, OwnedMessages, Step, TerminationReason, Trajectory
from headrace.data.sample import LearnerValues, Sample, TrainBatch, merge_steps
from headrace.data.task import Message
from headrace.ledger import Ledger

GROUP = 8
BATCH = 16  # groups of a step
TASKS = 20_000
SOURCES = ("countdown", "algebra", "code")
_POOL = 160  # groups that are made up, recorded again and again under new ids, with other rewards
_EVALUATED = 200  # tasks
_EVERY = 100  # steps between evaluations
_WORDS = ("make", "from", "use", "each", "number", "once", "search", "answer", "plus", "times", "minus", "try", "then")
_PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 100, "stop": []}


@dataclass(frozen=True)
class _Made:
    """A conversation that was made up: its replies, and the trajectory that they are."""

    outputs: tuple[ModelOutput, ...]
    trajectory: Trajectory


def make_large_run(run_dir: Path, episodes: int, report: Callable[[int], None] = lambda _: None) -> Path:
    """A finished run of so many episodes: ledger, metrics.jsonl, config.json. Takes minutes for a million."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = RunConfig().model_dump(mode="json")
    (run_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    with Ledger.open(run_dir) as ledger, (run_dir / "metrics.jsonl").open("w") as metrics:
        for dispatched, row in record_steps(ledger):
            metrics.write(json.dumps(row) + "\n")
            report(dispatched)
            if dispatched >= episodes:
                break
    (run_dir / "finished").touch()
    return run_dir


def record_steps(ledger: Ledger, seed: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
    """Record one step after the other; yields how many episodes there are so far, and the step's metrics."""
    rng = random.Random(seed)
    pool = [_make_group(rng) for _ in range(_POOL)]
    rows = [_rows_of(group, rng) for group in pool]
    group_id = 0
    for step in count():
        skill = 0.1 + 0.8 * step / (step + 800)
        if step % _EVERY == 0:
            _evaluate(ledger, rng, step, skill, pool)
        members: list[tuple[int, int, list[float]]] = []
        while len(members) < BATCH:
            number = rng.randrange(_POOL)
            fate = rng.random()
            rewards = [float(rng.random() < skill) if fate < 0.95 else 0.0 for _ in range(GROUP)]
            state = (
                "failed" if fate > 0.998 else "stale" if fate > 0.996 else "trained" if 0 < sum(rewards) < GROUP else ""
            )
            _record_group(ledger, rng, group_id, pool[number], rewards, step, state)
            if state == "trained":
                members.append((group_id, number, rewards))
            group_id += 1
        batch = _train_batch(members, rows)
        ids = [member for member, _, _ in members]
        ledger.batch(step, step, ids, pieces=[BATCH], trained=[batch])
        for member in ids:
            ledger.decided(member, "trained", step=step, trained=GROUP)
        ledger.committed(step, 1)
        ledger.published(step + 1, f"{step:016x}", step + 1)
        yield group_id * GROUP, _metrics(rng, step + 1, skill)


def _record_group(
    ledger: Ledger, rng: random.Random, group_id: int, group: list[_Made], rewards: list[float], step: int, state: str
) -> None:
    task, source = f"task-{rng.randrange(TASKS):05d}", SOURCES[group_id % len(SOURCES)]
    ledger.dispatched(group_id, (0, group_id), task, source, GROUP, step)
    for rollout, (made, reward) in enumerate(zip(group, rewards, strict=True)):
        ledger.started(group_id, rollout, 0, rng.getrandbits(60))
        for output, taken in zip(made.outputs, made.trajectory.steps, strict=True):
            ledger.called(
                group_id, rollout, 0, output, role="agent", seed=output.call, request_digest="0123456789abcdef",
                messages=taken.messages, params=_PARAMS,
            )  # fmt: skip
        ledger.resulted(
            group_id, rollout, 0, len(made.outputs), kind="judger", name="exact", request_digest="0123456789abcdef",
            payload=[reward, reward == 1.0, {"answer": reward}],
        )  # fmt: skip
        failed = state == "failed"
        ledger.finished(
            Episode(
                task, (replace(made.trajectory, reward=reward),), group_id, rollout,
                seed=rng.getrandbits(60), source=source,
                termination=TerminationReason.TIMEOUT if failed else TerminationReason.DONE, is_correct=reward == 1.0,
                error="timed out after 60 s" if failed else None, metrics={"answer": reward},
            ),
            rng.expovariate(0.2),
        )  # fmt: skip
    if state == "failed":
        ledger.decided(group_id, "failed", reason="every rollout failed", step=step, failed=GROUP)
    elif state == "stale":
        ledger.decided(group_id, "whole")
        ledger.decided(group_id, "stale", reason="older than trainer.max_staleness", step=step, stale=GROUP)
    elif state == "trained":
        ledger.decided(group_id, "whole")
    else:
        ledger.decided(group_id, "filtered", reason="all rewards are equal", step=step, filtered=GROUP)


def _evaluate(ledger: Ledger, rng: random.Random, step: int, skill: float, pool: list[list[_Made]]) -> None:
    episodes = []
    for task in range(_EVALUATED):
        made, reward = pool[task % _POOL][0], float(rng.random() < skill)
        episodes.append(
            Episode(f"dev-{task}", (replace(made.trajectory, reward=reward),), task, 0, is_correct=reward == 1.0)
        )
    share = sum(episode.reward for episode in episodes) / _EVALUATED
    ledger.evaluated(step, "dev", {"pass@1": share, "pass@1_low": share - 0.05, "pass@1_high": share + 0.05}, episodes)


def _train_batch(
    members: list[tuple[int, int, list[float]]], rows: list[list[tuple[Sample, LearnerValues]]]
) -> TrainBatch:
    samples, values = [], []
    for group_id, number, rewards in members:
        mean = sum(rewards) / GROUP
        for rollout, ((sample, learned), reward) in enumerate(zip(rows[number], rewards, strict=True)):
            advantage = (reward - mean,) * len(sample.loss_mask)
            samples.append(replace(sample, group_id=group_id, rollout_idx=rollout, advantages=advantage))
            values.append(learned)
    columns = zip(*((one.logprobs[0], one.entropies[0], one.clip_states[0]) for one in values), strict=True)
    return TrainBatch(
        tuple(samples), (1.0,) * len(samples), (), len(samples), learned=LearnerValues(*map(tuple, columns))
    )


def _rows_of(group: list[_Made], rng: random.Random) -> list[tuple[Sample, LearnerValues]]:
    found = []
    for made in group:
        (sample,) = merge_steps(made.trajectory)
        sampler = [p for p, kept in zip(sample.logprobs, sample.loss_mask, strict=True) if kept]
        logprobs = _singles([min(0.0, p + rng.gauss(0, 0.02)) for p in sampler])
        entropies = tuple(rng.expovariate(2) for _ in sampler)
        found.append(
            (sample, LearnerValues((logprobs,), (entropies,), (tuple(int(rng.random() < 0.01) for _ in sampler),)))
        )
    return found


def _make_group(rng: random.Random) -> list[_Made]:
    prompt = tuple(rng.randrange(2000) for _ in range(60))
    task: Message = {"role": "user", "content": _text(rng, 60)}
    return [_make(rng, prompt, task) for _ in range(GROUP)]


def _make(rng: random.Random, ids: tuple[int, ...], task: Message) -> _Made:
    history: list[Message] = [task]
    outputs: list[ModelOutput] = []
    steps: list[Step] = []
    for call in range(rng.randint(1, 3)):
        if call:
            history = [*history, outputs[-1].message, {"role": "user", "content": _text(rng, 20)}]
            ids = ids + outputs[-1].completion_ids + tuple(rng.randrange(2000) for _ in range(20))
        size = rng.randint(20, 60)
        said, logprobs = (
            tuple(rng.randrange(2000) for _ in range(size)),
            _singles([-rng.expovariate(2) for _ in range(size)]),
        )
        text = _text(rng, size)
        outputs.append(
            ModelOutput(text, ids, said, logprobs, logprobs, (rng.randrange(2),) * size, content=text, call=call)
        )
        steps.append(Step.from_model_output(outputs[-1], OwnedMessages(history)))
    return _Made(tuple(outputs), Trajectory(tuple(steps)))


def _singles(values: list[float]) -> tuple[float, ...]:
    return struct.unpack(f"{len(values)}f", struct.pack(f"{len(values)}f", *values))


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(tokens))


def _metrics(rng: random.Random, step: int, skill: float) -> dict[str, float]:
    """What a step reports; a few dozen keys, as a run has them."""
    noisy = {f"policy/own_{number}": rng.gauss(0, 1) for number in range(25)}
    found = {
        "step": step, "reward/mean": min(1.0, max(0.0, skill + rng.gauss(0, 0.05))), "time/step_s": rng.uniform(8, 12),
        "policy/loss": rng.gauss(0, 0.1), "policy/entropy": 1.5 - skill, "policy/clip_fraction": 0.01 * rng.random(),
        "tokens/generated": 10_000 + rng.randrange(900), "tokens/trained": 9_000 + rng.randrange(900),
        "tokens/generated_per_s": rng.uniform(900, 1100), "staleness/mean": rng.random(), "staleness/max": 1.0,
    }  # fmt: skip
    if (step - 1) % _EVERY == 0:
        found |= {"eval/dev/pass@1": skill, "eval/dev/pass@1_low": skill - 0.05, "eval/dev/pass@1_high": skill + 0.05}
    return found | noisy
