"""The runs that are killed: small, with every kind of event in them, in step and ahead, on the model and without one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from headrace import Model, Task, UnifiedTrainer, registry
from headrace.config import RunConfig
from headrace.data.episode import Episode
from headrace.judge.base import Judger, Verdict
from headrace.runfile import build_config
from null_backend import Null, NullBackend, some_tasks

STEPS = 6
GROUP = 3

_BASE: dict[str, Any] = {
    "run": {"name": "run", "deterministic": True},
    "rollout": {"group_size": GROUP, "max_tokens": 6},
    "optimizer": {"lr": 1e-3},
    "trainer": {"steps": STEPS, "batch_size": 2, "save_every": 2},
    "data": {"drop_last": False},
    "filters": {"drop_uniform": True},
    "eval": {"every": 2, "sets": {"dev": {"tasks": "countdown", "args": {"split": "test", "count": 2}}}},
    "track": {"trackers": ["jsonl", "tensorboard"], "plot": False},
}
_MODEL: dict[str, Any] = {"data": {"args": {"count": 7}}}
_NULL: dict[str, Any] = {"backend": {"name": "null"}, "engine": {"health_every_s": 1000.0}}
_APART, _AHEAD = {"placement": "separate"}, {"max_staleness": 2, "staleness": "wait"}

SCENARIOS: dict[str, dict[str, Any]] = {
    "in_step": _MODEL,
    "in_step_apart": {**_MODEL, "trainer": _APART},
    "ahead": {**_MODEL, "trainer": _AHEAD},
    "ahead_apart": {**_MODEL, "trainer": {**_AHEAD, **_APART}},
    "null_in_step": _NULL,
    "null_ahead": {**_NULL, "trainer": {**_AHEAD, **_APART}},
}


def layered(*layers: dict[str, Any]) -> dict[str, Any]:
    """Sections over sections."""
    sections = {name for layer in layers for name in layer}
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in sections}


def config_of(scenario: str, run_dir: Path, sections: dict[str, Any]) -> RunConfig:
    """Its configuration, in a folder."""
    place = {"run": {"dir": str(run_dir.parent), "name": run_dir.name}}
    return build_config(layered(_BASE, SCENARIOS[scenario], sections, place))


def train(scenario: str, run_dir: Path, sections: dict[str, Any]) -> None:
    """One life, if nothing ends it."""
    config = config_of(scenario, run_dir, sections)
    if config.backend.name == "local":
        UnifiedTrainer(config, converse, judger=Spread()).fit()
        return
    registry.register("backend", "null", RememberingNull(lambda seed: seed % 5 / 2000, 0.001))
    tasks = some_tasks(7)
    UnifiedTrainer(config, converse, tasks, Spread(), eval_tasks={"dev": some_tasks(2)}).fit()


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
        backend.engine.weights = {version: float(version) for version in range(1000)}
        return backend
