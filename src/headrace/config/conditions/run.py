"""When the settings of model, optimizer, backend, ledger and trackers have effect."""

from __future__ import annotations

from typing import Any

from headrace.config.derived import has_own, saves
from headrace.config.effect import Condition
from headrace.registry import builtin

_DEVICE = 'model.device is "{c.model.device}"'
MAYBE_CPU = Condition(
    lambda s: s.c.model.device in ("auto", "cpu"),
    f"it is for the CPU, and {_DEVICE}",
    "remove it, or change model.device",
)
MAYBE_ACCELERATOR = Condition(
    lambda s: s.c.model.device != "cpu", f"it is for accelerators, and {_DEVICE}", "remove it, or change model.device"
)
MAYBE_CUDA = Condition(
    lambda s: s.c.model.device == "auto" or s.c.model.device.startswith("cuda"),
    f"it is for CUDA, and {_DEVICE}",
    "remove it, or change model.device",
)
MAYBE_WIDE = Condition(
    lambda s: s.c.model.dtype in ("auto", "float32") and not (s.c.model.dtype == "auto" and s.c.model.device == "cpu"),
    'only float32 products are rounded so, and model.dtype is "{c.model.dtype}"',
    'remove it, or set model.dtype = "float32"',
)
BASE_FROZEN = Condition(
    lambda s: s.c.model.lora.rank > 0,
    "model.lora.rank is 0, and quantised weights cannot be trained",
    "remove it, or set model.lora.rank",
)
CHECKPOINTS = Condition(
    lambda s: s.own.gradient_checkpointing,
    "backend.gradient_checkpointing is false",
    "remove it, or set backend.gradient_checkpointing = true",
)
FSDP = Condition(
    lambda s: s.c.backend.name == "fsdp" or has_own({s.c.backend.name}, "backend"),
    'it is for backend "fsdp", and backend.name is "{c.backend.name}"',
)
RANKS = Condition(
    lambda s: s.c.backend.name in ("fsdp", "verl") or has_own({s.c.backend.name}, "backend"),
    'it is for backends with ranks ("fsdp", "verl"), and backend.name is "{c.backend.name}"',
)
VERL = Condition(
    lambda s: s.c.backend.name == "verl" or has_own({s.c.backend.name}, "backend"),
    'it is for backend "verl", and backend.name is "{c.backend.name}"',
)
NOT_VERL = Condition(
    lambda s: s.c.backend.name != "verl",
    'backend "verl" computes with verl\'s own forward pass',
    "remove it, or see docs/verl.md for what [backend.verl] has in its place",
)
TINKER_RANK = Condition(lambda s: s.c.backend.name != "tinker", "the adapters are the service's", "set tinker.rank")
NAMED_HERE = Condition(
    lambda s: s.c.backend.name != "tinker" or not s.c.tinker.model,
    'tinker.model = "{c.tinker.model}" says which model the service trains',
    "remove one of the two",
)
LORA = Condition(
    lambda s: s.own.rank > 0, "model.lora.rank is 0, so there are no adapters", "remove it, or raise model.lora.rank"
)
FALLS = Condition(
    lambda s: s.own.schedule != "constant",
    'optimizer.schedule is "constant", so the learning rate does not fall',
    'remove it, or set optimizer.schedule to "linear" or "cosine"',
)
NO_WARMUP_STEPS = Condition(
    lambda s: s.own.warmup_steps == 0,
    "optimizer.warmup_steps = {own.warmup_steps} says how long the warm-up is",
    "remove one of the two",
)
LEDGER = Condition(lambda s: s.own.enabled, "ledger.enabled is false", "remove one of the two")
PRUNES = Condition(
    lambda s: saves(s.c.trainer) or s.c.trainer.save_last,
    "old episodes are removed when a checkpoint is saved, and trainer.save_every, save_every_s and save_last are off",
    "remove it, or set one of these",
)
_SERVICES = {"wandb", "mlflow", "trackio"}


def _tracked_by(config: Any, some: set[str]) -> bool:
    """Whether one of these trackers is named, or one of the user's own."""
    return any(name in some or name not in builtin("tracker") for name in config.track.trackers)


AT_A_SERVICE = Condition(
    lambda s: _tracked_by(s.c, _SERVICES),
    "track.trackers has neither wandb, mlflow or trackio nor a tracker of your own",
    "remove it, or add one of these",
)
TAKES_MODEL = Condition(
    lambda s: _tracked_by(s.c, {"wandb", "mlflow"}),
    "track.trackers has neither wandb or mlflow nor a tracker of your own",
    "remove it, or add one of these",
)
TAKES_EPISODES = Condition(
    lambda s: _tracked_by(s.c, {*_SERVICES, "tensorboard"}),
    "track.trackers has neither tensorboard, wandb, mlflow or trackio nor a tracker of your own",
    "remove it, or add one of these",
)
LISTS_EPISODES = Condition(lambda s: s.own.episodes > 0, "track.episodes is 0", "remove one of the two")
