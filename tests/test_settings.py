"""What holds for every setting of every section, so that a new one cannot be forgotten."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.runfile import build_config, field_paths

NAMED = {"eval.sets": {"tasks": "countdown"}, "data.mixture": {"tasks": "countdown"}, "algorithm.roles": {}}
"""Tables of named sections, with the least that one needs."""


def every_setting() -> dict[str, FieldInfo]:
    """Key to field; settings of named sections under the name "x"."""
    found: dict[str, FieldInfo] = {}
    for path, field in field_paths():
        inner = get_args(field.annotation)
        if inner and isinstance(inner[-1], type) and issubclass(inner[-1], BaseModel):
            found |= {f"{path}.x.{key}": own for key, own in field_paths(inner[-1])}
        else:
            found[path] = field
    return found


SETTINGS = every_setting()


def nested(key: str, value: Any) -> dict[str, Any]:
    """The values of a run file in which `key` is `value`."""
    values: dict[str, Any] = {}
    section = values
    *parents, last = key.split(".")
    for done in range(len(parents)):
        path = ".".join(parents[:done])
        section = section.setdefault(parents[done], dict(NAMED.get(path, {})))
    section[last] = value
    return values


def kinds(field: FieldInfo) -> set[Any]:
    return {field.annotation, *get_args(field.annotation)}


NUMBERS = [key for key, field in SETTINGS.items() if kinds(field) & {int, float}]


def refused(key: str, value: Any) -> bool:
    try:
        RunConfig.model_validate(nested(key, value))
    except ValidationError as error:
        return any(".".join(map(str, problem["loc"])).startswith(key) for problem in error.errors())
    return False


@pytest.mark.parametrize("value", [True, False, float("inf"), float("-inf"), float("nan"), 10**30, -(10**30)], ids=str)
def test_no_number_can_be_a_truth_value_infinite_or_absurd(value: Any) -> None:
    assert len(NUMBERS) > 80
    assert [key for key in NUMBERS if not refused(key, value)] == []


@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_no_truth_value_can_be_a_number(value: Any) -> None:
    switches = [key for key, field in SETTINGS.items() if bool in kinds(field)]
    assert len(switches) > 20
    assert [key for key in switches if not refused(key, value)] == []


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("run.name", "a/b", "run.name: must be the name of one folder, got 'a/b'; folders above it go into run.dir"),
        ("run.name", "..", "run.name: must be the name of one folder"),
        ("run.name", "", "run.name: must be the name of one folder"),
        ("run.name", "x" * 300, "run.name: is longer than the 200 bytes"),
        ("run.dir", "a\0b", "run.dir: must be a path"),
        ("run.seed", 2**63, "run.seed: input should be less than 9223372036854775808"),
        ("optimizer.betas", [0.9, 1], "optimizer.betas.1: input should be less than 1, got 1"),
        ("optimizer.betas", [False, 0.9], "optimizer.betas.0: input should be a valid number, got False"),
        ("optimizer.betas", [-0.1, 0.9], "optimizer.betas.0: input should be greater than or equal to 0"),
        ("rollout.group_size", 100_000_000, "rollout.group_size: input should be less than or equal to 4096"),
        ("trainer.steps", True, "trainer.steps: must be a number, got true"),
    ],
)
def test_a_mistake_is_a_sentence(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config(nested(key, value))
    assert says in str(raised.value)
