"""Write the tables of docs/ that are made from code: metrics from their catalogue, algorithms from their facts,
memory from the plan.

    .venv/bin/python scripts/docs_tables.py

A page holds a table between `<!-- table: NAME (scripts/docs_tables.py) -->` and `<!-- end -->`.
tests/test_docs_tables.py checks that the pages are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.algorithms import overview
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.models.plan import ModelShape, memory_plan
from headrace.tracking.catalogue import SECTIONS, Reducer

DOCS = Path(__file__).parent.parent / "docs"
_TABLE = re.compile(r"(<!-- table: (\w+) \(scripts/docs_tables\.py\) -->\n).*?(<!-- end -->)", re.DOTALL)
_REDUCERS = {Reducer.WEIGHTED_MEAN: "mean by count"}


def metrics() -> Iterator[str]:
    """Every metric, by section."""
    for title, section in SECTIONS.items():
        yield from ("", f"## {title}", "", "| key | unit | over a step | meaning |", "| --- | --- | --- | --- |")
        for metric in section:
            reducer = _REDUCERS.get(metric.reducer, str(metric.reducer))
            yield f"| `{metric.key}` | {metric.unit} | {reducer} | {metric.meaning} |"
    yield ""


def facts() -> Iterator[str]:
    """What each objective, estimator, loss and correction needs, the settings that it reads, and who can do it."""
    yield from ("", "| kind | name | needs | settings | backends |", "| --- | --- | --- | --- | --- |")
    for entry in overview.algorithms():
        if entry.kind in ("objective", "estimator", "loss", "correction"):
            needs, backends = ", ".join(entry.needs), ", ".join(entry.backends)
            settings = ", ".join(f"`{name}`" for name in entry.settings)
            yield f"| {entry.kind} | `{entry.name}` | {needs} | {settings} | {backends} |"
    yield ""


_MODELS = {  # layers, width, feed-forward, queries, keys, vocabulary, tied: as their config.json has it
    "Qwen2.5-0.5B": ModelShape(24, 896, 4864, 896, 128, 151_936, True),
    "Qwen2.5-1.5B": ModelShape(28, 1536, 8960, 1536, 256, 151_936, True),
    "Qwen2.5-3B": ModelShape(36, 2048, 11_008, 2048, 256, 151_936, True),
    "Qwen2.5-7B": ModelShape(28, 3584, 18_944, 3584, 512, 152_064, False),
    "Llama-3.1-8B": ModelShape(32, 4096, 14_336, 4096, 1024, 128_256, False),
    "Qwen2.5-14B": ModelShape(48, 5120, 13_824, 5120, 1024, 152_064, False),
}
_LEAN: dict[str, Any] = {"gradient_checkpointing": True, "micro_batch_tokens": 4096, "logits_chunk": 512}
_WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, `optimizer.offload`": {"optimizer": {"offload": True}},
    "adapters": {"model": {"lora": {"rank": 16}}},
    'adapters, `quantize = "nf4"`': {"model": {"lora": {"rank": 16}, "quantize": "nf4"}},
}


def memory() -> Iterator[str]:
    """Peak memory by size of the model and by what is trained; `headrace doctor --plan` computes the same of a run."""
    yield from ("", f"| model | weights | {' | '.join(_WAYS)} |", f"| --- | --- |{' --- |' * len(_WAYS)}")
    for name, shape in _MODELS.items():
        cells = [f"{memory_plan(_planned(way), shape).peak / 2**30:.0f} GiB" for way in _WAYS.values()]
        yield f"| {name} | {shape.parameters / 1e9:.1f} B | {' | '.join(cells)} |"
    yield ""


def _planned(way: dict[str, Any]) -> RunConfig:
    model = {"device": "cuda", **way.get("model", {})}
    return build_config({"rollout": {"max_tokens": 1024}, "backend": _LEAN, **way, "model": model})


TABLES: dict[str, Callable[[], Iterator[str]]] = {"metrics": metrics, "facts": facts, "memory": memory}


def updated(text: str) -> str:
    """A page with its tables as they are now."""
    return _TABLE.sub(lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3], text)


def main() -> None:
    """Update every page that holds a table."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if updated(text) != text:
            page.write_text(updated(text), encoding="utf-8")
            print(f"updated {page.name}")


if __name__ == "__main__":
    main()
