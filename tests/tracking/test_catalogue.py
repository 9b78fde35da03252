"""The catalogue of metrics: all that is recorded is in it, and all that is in it is recorded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import headrace
from fakes import trajectory
from headrace.algorithms.preference import SKIP_REASONS
from headrace.backends.local.token_losses import MicroBatch, settle
from headrace.backends.local.tokens import TokenTensors, TokenValues
from headrace.data.episode import Episode
from headrace.data.sample import Sample, TrainBatch
from headrace.errors import DataError
from headrace.evaluation.evaluator import evaluation_metrics, under
from headrace.ledger.account import Account
from headrace.tracking import catalogue
from headrace.tracking.catalogue import CATALOGUE, Metric, Reducer, find
from headrace.tracking.metrics import MetricsAggregator
from null_backend import null_run

SOURCE = Path(headrace.__file__).parent
AREAS = {metric.key.partition("/")[0] for metric in CATALOGUE}
OWN = {metric.key for metric in catalogue.SECTIONS["Your own"]}
GAPS = re.compile(r"<\w*>")


# ---- what the source records -----------------------------------------------------------------------------------------


def text_of(node: ast.AST | None) -> str | None:
    """A text, or an f-string with `<>` for its gaps; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "<>" for part in node.values)
    return None


def written(tree: ast.AST) -> Iterator[str | None]:
    """What a metric is recorded under: first arguments of `record` and `record_each`, prefixes, keys of dicts."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="record" | "record_each"), args=[key, *_]):
                yield text_of(key)
            case ast.keyword(arg="prefix", value=prefix):
                yield f"{text_of(prefix)}<>"
            case ast.Dict(keys=keys):
                yield from map(text_of, keys)
            case ast.DictComp(key=key):
                yield text_of(key)
            case ast.Subscript(slice=key, ctx=ast.Store()):
                yield text_of(key)


def recorded_keys() -> set[str]:
    """Keys in the source, with `<>` for gaps."""
    modules = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "tracking" / "catalogue.py"]
    found = {text for path in modules for text in written(ast.parse(path.read_text(encoding="utf-8")))}
    return {text for text in found if text and text.partition("/")[0] in AREAS and "/" in text}


def composed() -> dict[str, list[str]]:
    """Keys that are put together from parts, by how that stands in the source."""
    losses, values = MetricsAggregator(), torch.ones(2)
    sample = Sample((1, 2, 3), (1, 1), (0.0, 0.0), (0, 0), (0.0, 0.0))
    found = MicroBatch(values, values, values, {}, torch.zeros(1, dtype=torch.bool), torch.zeros(2), rejects=False)
    batch = TrainBatch((sample,), (1.0,), ((0,),), 1)
    settle(found, TokenTensors([sample], [1.0]), batch, [0], losses, TokenValues(1))
    task = [Episode("task", (trajectory(reward=1.0),), source=source) for source in "ab"]
    evaluated = evaluation_metrics([[task[0]] * 2, [task[1]] * 2], attempts=2)
    return {
        "episodes/<>": [f"episodes/{field.name}" for field in fields(Account)],
        "time/group_s/<>": ["time/group_s/token_place", "time/group_s/long_token_place"],
        "drift/of/<>/<>": ["drift/of/torch/float32"],
        "dpo/skipped/<>": [f"dpo/skipped/{reason}" for reason in SKIP_REASONS],
        "eval/<>/<>": [*under("dev", evaluated), "eval/dev/own"],
        "policy/loss": [key for key in losses.renamed("policy/", "sft/").reduce() if key.startswith("sft/")],
    }


def test_everything_that_the_source_records_is_in_the_catalogue() -> None:
    found, known = recorded_keys(), composed()
    assert len(found) > 50
    keys = [key for text in found for key in (known.get(text) or [text.replace("<>", "1")])]
    assert [key for key in keys if find(key) is None] == []


def test_everything_in_the_catalogue_is_recorded_somewhere() -> None:
    found, known = recorded_keys(), composed()
    assert known.keys() <= found
    from_parts = {metric.key for keys in known.values() for key in keys if (metric := find(key))}
    texts = {GAPS.sub("<>", text) for text in found} - known.keys() | {"policy/loss"}
    missing = [
        metric.key
        for metric in CATALOGUE
        if metric.key not in from_parts and GAPS.sub("<>", metric.key) not in texts and metric.key not in OWN
    ]
    assert missing == ["eval/<set>/<source>/<metric>"]  # each of them has the name of a metric of the set


def test_everything_that_a_run_reports_is_in_the_catalogue(tmp_path: Path) -> None:
    dev = {"tasks": "countdown", "args": {"count": 2}}
    ran = null_run(tmp_path, trainer={"max_staleness": 1}, eval={"every": 3, "sets": {"dev": dev}})
    assert [key for row in ran.rows for key in row if key != "step" and find(key) is None] == []
    assert any("eval/step" in row for row in ran.rows)


def test_headrace_leaves_the_reducer_to_the_catalogue() -> None:
    named = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "tracking" and "Reducer." in path.read_text(encoding="utf-8")
    ]
    assert named == ["backends/local/token_losses.py"]  # which records what a user's loss returns


# ---- the catalogue ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.key)
def test_a_metric_is_found_by_its_key_and_says_what_it_means(metric: Metric) -> None:
    key = GAPS.sub("1", metric.key)
    found = find(key)
    assert found is metric or (found and metric.key in {*OWN, "eval/<set>/<source>/<metric>"})
    assert metric.meaning and not metric.meaning.endswith(".") and "|" not in metric.meaning


def test_no_key_is_there_twice() -> None:
    keys = [metric.key for metric in CATALOGUE]
    assert len(keys) == len(set(keys))


def test_the_reducer_comes_from_the_catalogue() -> None:
    metrics = MetricsAggregator()
    for value in (1.0, 3.0):
        metrics.record("batch/rows", value)
        metrics.record("staleness/max", value)
        metrics.record("reward/critic/mean", value)
        metrics.record("policy/loss", value, weight=value)
    assert metrics.reduce() == {
        "batch/rows": 4.0,
        "policy/loss": 2.5,
        "reward/critic/mean": 2.0,
        "staleness/max": 3.0,
    }


def test_another_reducer_than_the_catalogues_is_refused() -> None:
    with pytest.raises(DataError, match=r'"batch/rows" .* "mean", and in the catalogue it has "sum"'):
        MetricsAggregator().record("batch/rows", 1.0, Reducer.MEAN)


def test_an_unknown_key_is_refused_in_tests() -> None:
    with pytest.raises(DataError, match='"policy/lost" is not in the catalogue'):
        MetricsAggregator().record("policy/lost", 1.0, Reducer.MEAN)


@pytest.mark.usefixtures("any_metric")
def test_an_unknown_key_of_a_users_is_accepted_in_a_run_and_needs_a_reducer() -> None:
    metrics = MetricsAggregator()
    metrics.record("mine/score", 1.0, Reducer.MEAN)
    assert metrics.reduce() == {"mine/score": 1.0}
    with pytest.raises(DataError, match='"mine/other" is not in the catalogue'):
        metrics.record("mine/other", 1.0)


def test_headrace_records_nothing_in_the_areas_of_users() -> None:
    own = {"episode", "loss"}
    headraces = {metric.key.partition("/")[0] for metric in CATALOGUE if metric.key not in OWN}
    assert not own & headraces
