"""The runs that are killed: small, with every kind of event in them, in step and ahead, with and without a model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from headrace import Model, Task, UnifiedTrainer, registry
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.data.episode import Episode
from headrace.judge.base import Judger, Verdict
from null_backend import Null, NullBackend, some_tasks

TASKS = 7

_BASE: dict[str, Any] = {
    "run": {"deterministic": True},
    "workflow": {"name": "crash_scenarios:converse", "judger": "crash_scenarios:Spread"},
    "rollout": {"group_size": 3, "max_tokens": 6},
    "optimizer": {"lr": 1e-3},
    "trainer": {"steps": 6, "batch_size": 2, "save_every": 2},
    "data": {"args": {"count": TASKS}, "drop_last": False},
    "filters": {"drop_uniform": True},
    "eval": {"every": 2, "sets": {"dev": {"tasks": "countdown", "args": {"split": "test", "count": 2}}}},
    "track": {"trackers": ["jsonl", "tensorboard"], "plot": False},
}
_NULL: dict[str, Any] = {
    "backend": {"name": "null"},
    "data": {"tasks": "crash_scenarios:few_tasks"},
    "engine": {"name": "null", "health_every_s": 1000.0},
    "eval": {"sets": {"dev": {"tasks": "crash_scenarios:few_tasks", "args": {"count": 2}}}},
}
_SEPARATE: dict[str, Any] = {"trainer": {"placement": "separate"}}
_AHEAD: dict[str, Any] = {"trainer": {"max_staleness": 2, "staleness": "wait"}}


def layered(*layers: dict[str, Any]) -> dict[str, Any]:
    """Sections over sections."""
    sections = {name for layer in layers for name in layer}
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in sections}


SCENARIOS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "synchronous_separate": _SEPARATE,
    "ahead": _AHEAD,
    "ahead_separate": layered(_AHEAD, _SEPARATE),
    "null_synchronous": _NULL,
    "null_ahead": layered(_NULL, _AHEAD, _SEPARATE),
    # epochs of seven tasks in batches of three, whose last is short or dropped
    **{
        f"epochs_{'dropped' if drop else 'short'}_{seed}": layered(
            _NULL, {"trainer": {"batch_size": 3, "steps": 7}, "data": {"drop_last": drop}, "run": {"seed": seed}}
        )
        for drop in (True, False)
        for seed in (1, 2, 3)
    },
    "several_updates": layered(_NULL, {"trainer": {"updates_per_batch": 2, "steps": 8, "save_every": 4}}),
    "reuse": layered(_NULL, _AHEAD, {"produce": {"reuse": 2}, "trainer": {"batch_size": 4}}),
    "partly_solved": layered(_NULL, {"filters": {"drop_uniform": False, "min_partial_tasks": 3}}),
    "without_checkpoints": layered(_NULL, {"trainer": {"save_every": 0}}),
    "without_partial_rollouts": layered(_NULL, _AHEAD, _SEPARATE, {"trainer": {"partial_rollouts": False}}),
    "short_memory": layered(_NULL, _AHEAD, {"ledger": {"keep_steps": 1}}),
    **{f"ahead_{policy}": layered(_NULL, _AHEAD, _SEPARATE, {"trainer": {"staleness": policy}})
       for policy in ("count", "drop", "mask", "trust")},
}  # fmt: skip


def config_of(scenario: str, run_dir: Path) -> RunConfig:
    """Its configuration, in a folder."""
    place = {"run": {"dir": str(run_dir.parent), "name": run_dir.name}}
    return build_config(layered(_BASE, SCENARIOS[scenario], place))


def train(scenario: str, run_dir: Path) -> None:
    """One life, if nothing ends it."""
    registry.register("backend", "null", RememberingNull(lambda seed: seed % 5 / 2000, 0.001))
    UnifiedTrainer(config_of(scenario, run_dir)).fit()


def few_tasks(count: int) -> list[Task]:
    """Tasks for where there is no model."""
    return some_tasks(count)


async def converse(task: Task, model: Model) -> None:
    """Two calls with a tool between them; the judger decides."""
    first = await model.chat(task.messages)
    letters = await model.tool(count_letters, first.text)
    question = {"role": "user", "content": f"That has {letters} letters. Again!"}
    await model.chat([*task.messages, first.message, question], max_tokens=4)


def count_letters(text: str) -> int:
    return len(text)


class Spread(Judger):
    """Rewards that differ within most groups, and by what was sampled alone."""

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        await asyncio.sleep(0)
        ids = [token for t in episode.trajectories for step in t.steps for token in step.response_ids]
        return Verdict(float(sum(ids) % 3), sum(ids) % 3 == 2)


class RememberingNull(Null):
    """Backends that know the weights of all versions, also of those that an earlier process published."""

    def __call__(self, config: RunConfig) -> NullBackend:
        backend = super().__call__(config)
        steps = config.trainer.updates_per_batch
        backend.engine.weights = {version: float(version * steps) for version in range(1000)}
        return backend
