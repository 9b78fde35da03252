"""Which settings may change when a run is resumed. A change of any other is refused, with the difference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RunConfig, flatten
from headrace.errors import ConfigError

FREE = (
    "run.name", "run.dir", "run.resume", "run.grace_s",
    "trainer.save_every", "trainer.save_every_s", "trainer.save_last", "trainer.save_async",
    "trainer.keep_last", "trainer.keep_best", "trainer.best_metric", "trainer.callbacks", "trainer.hook_timeout_s",
    "rollout.max_concurrent", "rollout.timeout_s", "filters.most_replacements",
    "produce.capacity", "produce.spill_above_mb",
    "optimizer.offload", "rollout.retries", "data.on_overlap", "engine", "eval", "gateway",
    "tinker.base_url", "tinker.api_key_env", "tinker.ttl_s", "track", "ledger", "alarm", "simulate",
    "backend.rank_timeout_s", "cluster", "launch", "judge.placement", "judge.actors",
)  # fmt: skip
"""Settings and sections that do not change what is learned: how a run is monitored, stored and supplied."""

UNLESS_DETERMINISTIC = (
    "backend.micro_batch_tokens", "backend.logits_chunk", "backend.share_prefixes", "backend.gradient_checkpointing",
    "backend.checkpoint_every", "backend.ranks", "backend.shard", "backend.cpu_offload", "backend.tensor_parallel",
    "backend.context_parallel", "backend.threads",
    "engine.threads", "engine.kept_tokens", "trainer.placement",
    "trainer.stream", "trainer.release_cache",
    "model.device", "model.dtype", "model.tf32", "model.attention", "model.fast_path", "optimizer.master_dtype",
)  # fmt: skip
"""Settings that change results by rounding, which `run.deterministic` does not allow."""

FIXED = ("engine.max_model_length",)
"""Exceptions to FREE: it cuts responses."""

BOUND_TO_STATE = ("model", "data", "algorithm.value_head")
"""What the weights and the position in the task order of a checkpoint are bound to, also in a run of its own."""

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is not as it was."""

    key: str
    stored: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.stored)} → {_shown(self.new)}"


def changes(stored: dict[str, Any], config: RunConfig) -> list[Change]:
    """What differs from a stored config.json. A setting that it does not have was at today's default."""
    new, usual = (dict(flatten(one.model_dump(mode="json"))) for one in (config, RunConfig()))
    before = usual | _as_written_today(dict(flatten(stored)))
    found = (Change(key, before.get(key, _ABSENT), new.get(key, _ABSENT)) for key in sorted({*before, *new}))
    return [change for change in found if change.stored != change.new]


def _as_written_today(stored: dict[str, Any]) -> dict[str, Any]:
    """A file from before there were devices has the type that was the default then, and is "auto" now on the CPU."""
    if "model.device" not in stored and stored.get("model.dtype") == "float32":
        return stored | {"model.dtype": "auto"}
    return stored


def check_resume(stored: dict[str, Any], config: RunConfig, folder: Path, has_checkpoint: bool) -> list[str]:
    """Raise ConfigError for what must stay as the run in `folder` has it; notes on all other changes."""
    found = changes(stored, config)
    refused = [change for change in found if not _may_change(change, config.run.deterministic)]
    if refused:
        shown = "; ".join(f"{change}{_why_refused(change)}" for change in refused)
        raise ConfigError(
            f"the run in {folder} was begun with other settings: {shown}. Take the change back, or "
            f"{_new_run(folder, has_checkpoint)}"
        )
    shown = [change for change in found if not _within(change.key, ("run",))]
    notes = [f"changed settings: {'; '.join(map(str, shown))}"] if shown else []
    if any(change.key == "trainer.steps" for change in shown) and _rate_depends_on_steps(config):
        notes.append(f"the learning rate follows the schedule of {config.trainer.steps} steps from here on")
    return notes


def check_numerics(stored: dict[str, str], now: dict[str, str], folder: Path, has_checkpoint: bool) -> None:
    """Raise ConfigError if the bits of a deterministic run would not be those of its beginning."""
    if different := numeric_changes(stored, now):
        raise ConfigError(
            f"the run in {folder} is deterministic, and was begun where results are rounded otherwise: "
            f"{'; '.join(map(str, different))}. Resume it where it was begun (HEADRACE_NATIVE=0 switches native "
            f"kernels off, a C compiler on the PATH brings them back), or {_new_run(folder, has_checkpoint)}"
        )


def _new_run(folder: Path, has_checkpoint: bool) -> str:
    """What to do instead of resuming."""
    new = 'start a new run with run.resume = "never"'
    branch = f', or one from its newest checkpoint with run.resume = "{folder}" and another run.name'
    return new + branch if has_checkpoint else new


def numeric_changes(stored: dict[str, str], now: dict[str, str]) -> list[Change]:
    """What differs; nothing, where it is not known of both."""
    keys = sorted({*stored, *now}) if stored and now else ()
    found = (Change(key, stored.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys)
    return [change for change in found if change.stored != change.new]


def check_branching(stored: dict[str, Any], config: RunConfig, source: Path) -> list[str]:
    """Raise ConfigError for what a checkpoint of `source` cannot be used with; notes on other differences."""
    found = [
        change for change in changes(stored, config) if not _within(change.key, ("run.name", "run.dir", "run.resume"))
    ]
    free = (*FREE, *UNLESS_DETERMINISTIC)
    refused = [change for change in found if _within(change.key, BOUND_TO_STATE) and not _within(change.key, free)]
    if refused:
        raise ConfigError(
            f"{source} was made with other settings: {'; '.join(map(str, refused))}. Take the change back; or, to use "
            f"its weights for something else, write them with `headrace export {source} FOLDER` and set model.name"
        )
    return [f"settings that differ from those of {source}: {'; '.join(map(str, found))}"] if found else []


def _may_change(change: Change, deterministic: bool) -> bool:
    if change.key == "trainer.steps":
        return change.new > change.stored
    if _within(change.key, UNLESS_DETERMINISTIC):
        return not deterministic
    return _within(change.key, FREE) and not _within(change.key, FIXED)


def _why_refused(change: Change) -> str:
    return " (it may only grow)" if change.key == "trainer.steps" else ""


def _within(key: str, settings: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in settings)


def _rate_depends_on_steps(config: RunConfig) -> bool:
    section = config.optimizer
    return section.schedule != "constant" or (section.warmup_ratio > 0 and not section.warmup_steps)


def _shown(value: Any) -> str:
    return "(none)" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
