"""VerlBackend: Headrace's backend over verl's worker group. verl is imported once its platform is known."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import ClassVar

import torch

from headrace.backends.base import refuse_changed
from headrace.backends.fsdp.backend import FsdpBackend, check_ranks
from headrace.backends.fsdp.launching import Launcher
from headrace.backends.local.check import check_model
from headrace.backends.local.token_losses import require_known_losses
from headrace.backends.verl.platform import choose_platform, missing_for_megatron, on_gpus, strategy_of
from headrace.config import RunConfig
from headrace.config.derived import asks_teacher
from headrace.errors import ConfigError
from headrace.models.device import forward_dtype
from headrace.registry import load_object
from headrace.weights.sender import TO_SERVERS

_MEGATRON = 'backend.verl.engine.strategy = "megatron"'


class VerlBackend(FsdpBackend):
    """Full fine-tuning or LoRA by verl's FSDP2 engine. What it computes is what the local backend would."""

    transports: ClassVar[tuple[str, ...]] = ("shared_memory", *TO_SERVERS)
    snapshot = None  # type: ignore[assignment]  # its workers write their files at once

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._config = config

    @staticmethod
    def new_launcher(config: RunConfig) -> Launcher:
        choose_platform(config)
        return load_object("headrace.backends.verl.launching:VerlLauncher")(config)

    @staticmethod
    def check(config: RunConfig) -> None:
        require_known_losses(config)
        _refuse(config)
        _check_cluster(config)
        check_ranks(config)
        check_model(config, fast_path=False)
        choose_platform(config)
        load_object("headrace.backends.verl.used:require_all")()
        load_object("headrace.backends.verl.settings:check_settings")(config)
        if strategy_of(config) == "megatron":
            warnings.warn(
                f"{_MEGATRON}: verl's own classes accept its settings; it was not run on hardware", stacklevel=2
            )

    @staticmethod
    def check_machine(config: RunConfig) -> None:
        if strategy_of(config) != "megatron":
            return
        if missing := list(missing_for_megatron(config)):
            raise ConfigError(
                f"{_MEGATRON} cannot start here: {', '.join(missing)}; start it where megatron-core, megatron-bridge "
                f'and GPUs are, or set it to "fsdp2". With --dry-run its settings are checked without them'
            )
        raise ConfigError(
            f"{_MEGATRON} is configured and checked, and not trained yet: the learner reads gradients and weights of "
            f'FSDP2 only; set it to "fsdp2"'
        )

    @property
    def where(self) -> str:
        config = self._config
        dtype = str(forward_dtype(config.model)).removeprefix("torch.")
        ranks = f"{self.group.ranks.size} rank{'s' if self.group.ranks.size > 1 else ''}"
        device = "GPUs" if on_gpus(config) else "the CPU"
        return (
            f"verl {version('verl')}, {strategy_of(config)}, {ranks} on {device} in {dtype} (gradients and optimizer: "
            f"float32)"
        )


def _check_cluster(config: RunConfig) -> None:
    if not config.cluster.address:
        raise ConfigError(
            'backend "verl" runs its workers as Ray actors, and cluster.address is empty; set cluster.address = '
            '"local" for this machine, or name a cluster'
        )
    device = config.model.device
    accelerated = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if accelerated and not on_gpus(config):
        raise ConfigError(
            f'model.device = "{device}" is a GPU, and the ranks of backend "verl" have none; set cluster.learner = '
            f'{{ CPU = 1, GPU = 1 }}, or model.device = "cpu"'
        )
    if on_gpus(config) and not accelerated and device != "auto":
        raise ConfigError(
            f'cluster.learner gives every rank a GPU, and model.device = "{device}"; set model.device = "cuda", or '
            f"remove GPU from cluster.learner"
        )


def _refuse(config: RunConfig) -> None:
    """What verl's worker cannot do."""
    if config.algorithm.value_head:
        raise ConfigError(
            'backend "verl" has no value head; set algorithm.value_head = false and another algorithm.estimator than '
            '"gae", or use backend "fsdp"'
        )
    if asks_teacher(config.algorithm):
        raise ConfigError('backend "verl" asks no teacher; use another algorithm.estimator, or backend "fsdp"')
    if config.run.deterministic:
        raise ConfigError(
            'run.deterministic = true: what backend "verl" computes for a row depends on the rows that it is padded '
            'with; set it to false, or use backend "fsdp"'
        )
    if config.model.dtype == "float64":
        raise ConfigError(
            'model.dtype = "float64": verl knows float32 and bfloat16; set one of them, or use backend "fsdp"'
        )
    if config.model.lora.dropout:
        raise ConfigError(
            f"model.lora.dropout = {config.model.lora.dropout}: verl's adapters have none; set it to 0, or use backend "
            f'"fsdp"'
        )
    refuse_changed(config, "distill.teacher", "distill.refresh_every")
