"""What there is to choose from, in one line each, and which backends can do it. Reads docstrings, imports nothing."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from headrace.config import CorrectionSection, FilterSection, KlSection
from headrace.registry import builtin

# Per backend and kind: the names it supports, or None for all. A backend that is not here has not been tried.
SUPPORT: dict[str, dict[str, frozenset[str] | None]] = {
    "local": {"objective": None, "estimator": None, "loss": None, "correction": None, "kl": None, "filter": None},
    "tinker": {
        "objective": None,
        "estimator": frozenset(builtin("estimator")) - {"gae"},  # it needs a value head
        "loss": None,
        "correction": None,
        "kl": None,
        "filter": None,
    },
}

_OBJECTIVES = {
    "rl": "Train on rollouts by advantages.",
    "sft": "Imitate the assistant turns of given conversations.",
    "dpo": "Prefer the better of two rollouts, or of two given replies.",
}
_CORRECTIONS = {
    "none": "Trust the sampler's log-probabilities.",
    "tis": "Weigh tokens or sequences by learner / sampler, clamped.",
    "icepop": "Weigh tokens by learner / sampler, and drop those outside the bounds.",
    "sequence_mask": "Drop sequences whose mean weight is outside the bounds.",
    "veto": "Drop sequences with a token whose weight is below the floor.",
}
_KL = {
    "k1": "d = log policy - log reference.",
    "k2": "d² / 2: low variance, biased.",
    "k3": "exp(-d) - 1 + d: low variance, never negative.",
    "abs": "|d|.",
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One thing to choose by name."""

    kind: str
    name: str
    summary: str
    backends: tuple[str, ...]


def algorithms() -> list[Algorithm]:
    """Every objective, estimator, loss, correction, divergence and filter."""
    corrections = get_args(CorrectionSection.model_fields["name"].annotation)
    divergences = get_args(KlSection.model_fields["kind"].annotation)
    filters = {name: (field.description or "").split(";")[0] for name, field in FilterSection.model_fields.items()}
    return [
        *(_entry("objective", name, _OBJECTIVES[name]) for name in builtin("objective")),
        *(_entry("estimator", name, _summary(path)) for name, path in builtin("estimator").items()),
        *(_entry("loss", name, _summary(path)) for name, path in builtin("loss").items()),
        *(_entry("correction", name, _CORRECTIONS[name]) for name in corrections),
        *(_entry("kl", name, _KL[name]) for name in divergences),
        *(_entry("filter", name, " ".join(text.split())) for name, text in filters.items()),
    ]


def _entry(kind: str, name: str, summary: str) -> Algorithm:
    able = [backend for backend, kinds in SUPPORT.items() if kinds[kind] is None or name in (kinds[kind] or ())]
    return Algorithm(kind, name, summary, tuple(able))


def _summary(path: str) -> str:
    """First line of an object's docstring, read from the source: importing it might load torch."""
    module, _, name = path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is registered and not there"
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").splitlines()[0]
    raise AssertionError(f"{path} is registered and not there")
