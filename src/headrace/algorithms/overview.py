"""What there is to choose from: every algorithm in one line, and what is declared about it. Imports no algorithm."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.algorithms.facts import (
    BACKENDS,
    CORRECTIONS,
    ESTIMATORS,
    FACTS,
    KLS,
    LOSSES,
    OBJECTIVES,
    EstimatorFacts,
    Facts,
    LossFacts,
)
from headrace.config import FilterSection
from headrace.registry import builtin


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One thing to choose by name."""

    kind: str
    name: str
    summary: str
    needs: tuple[str, ...]
    """What a run that uses it must have, in words."""
    settings: tuple[str, ...]
    """Settings that it reads, apart from those that all read."""
    backends: tuple[str, ...]


def algorithms() -> list[Algorithm]:
    """Every objective, estimator, loss, correction, divergence and filter."""
    filters = {name: (field.description or "").split(";")[0] for name, field in FilterSection.model_fields.items()}
    return [
        *(_entry("objective", name, one.summary) for name, one in OBJECTIVES.items()),
        *(_entry("estimator", name, _summary(builtin("estimator")[name])) for name in ESTIMATORS),
        *(_entry("loss", name, _summary(builtin("loss")[name])) for name in LOSSES),
        *(_entry("correction", name, one.summary) for name, one in CORRECTIONS.items()),
        *(_entry("kl", name, one.summary) for name, one in KLS.items()),
        *(Algorithm("filter", name, " ".join(text.split()), (), (), tuple(BACKENDS)) for name, text in filters.items()),
    ]


def _entry(kind: str, name: str, summary: str) -> Algorithm:
    facts = FACTS[kind][name]
    valued = getattr(facts, "needs_value_head", False)
    able = tuple(backend for backend, can in BACKENDS.items() if can.value_head or not valued)
    return Algorithm(kind, name, summary, tuple(_needs(kind, name, facts)), getattr(facts, "settings", ()), able)


def _needs(kind: str, name: str, facts: Facts) -> Iterator[str]:
    if isinstance(facts, EstimatorFacts):
        if facts.group_relative:
            yield "groups of 2 or more"
        if facts.needs_value_head:
            yield "a value head"
        if facts.needs_teacher:
            yield "a teacher"
        if not facts.one_group:
            yield "complete batches"
    if isinstance(facts, LossFacts) and facts.ratio:
        yield "sampled tokens"
    if getattr(facts, "needs_pairs", False):
        yield "pairs"
    if getattr(facts, "needs_reference", False) or kind == "kl":
        yield "a reference"
    if kind == "correction" and name != "none":
        yield 'proximal = "recompute"'


def _summary(path: str) -> str:
    """First line of an object's docstring, read from the source: importing it might load torch."""
    module, _, name = path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is registered and not there"
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").splitlines()[0]
    raise AssertionError(f"{path} is registered and not there")
