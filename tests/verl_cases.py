"""The cases of ranks against one learner, for verl's workers."""

from __future__ import annotations

from typing import Any

from fsdp_cases import BUDGET, Case
from headrace.backends.fsdp.group import LearnerGroup
from headrace.backends.verl.backend import VerlBackend
from headrace.config import RunConfig
from headrace.config.loading import build_config
from verl_pool import verl_sections


def sections(case: Case) -> dict[str, Any]:
    """What the run files of both sides have in common."""
    backend = {key: value for key, value in case.sections.get("backend", {}).items() if key != "logits_chunk"}
    return {
        "model": {"dtype": "float32", **case.sections.get("model", {})},
        "optimizer": {"eps": 1e-3, **case.sections.get("optimizer", {})},
        "backend": {"micro_batch_tokens": BUDGET, **backend},
    }


def verl_config(case: Case, ranks: int = 2) -> RunConfig:
    return build_config(verl_sections(ranks, **sections(case)))


def new_group(config: RunConfig) -> LearnerGroup:
    return LearnerGroup(VerlBackend.new_launcher(config), config.backend.micro_batch_tokens)
