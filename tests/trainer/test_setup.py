"""From a configuration to the parts of a run: what is wrong is found before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from fakes import FakeEngines, FakeHost
from headrace import registry
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.config.rules import resolve_objective
from headrace.errors import ConfigError, DataError
from headrace.evaluation.evaluate import evaluate_run
from headrace.evaluation.setup import assemble_evaluation
from headrace.trainer.setup import UserObjects, assemble


class FakeBackend(FakeHost):
    """Remembers what was asked of it, in order."""

    said: ClassVar[list[str]] = []

    def __init__(self, config: RunConfig) -> None:
        self.said.append("load")

    @staticmethod
    def check(config: RunConfig) -> None:
        FakeBackend.said.append("check")

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the backend was asked."""
    monkeypatch.setattr(registry, "_registered", {("backend", "fake"): FakeBackend, ("engine", "fake"): FakeEngines()})
    monkeypatch.setattr(FakeBackend, "said", [])
    return FakeBackend.said


def config(**sections: Any) -> RunConfig:
    fake = {"backend": {"name": "fake"}, "engine": {"name": "fake"}}
    base = {**fake, "workflow": {"judger": "countdown"}, "data": {"args": {"count": 20}}}
    return resolve_objective(build_config({**base, **sections}))


DEV = {"sets": {"dev": {"tasks": "countdown", "args": {"split": "test", "count": 3}}}}


def test_the_backend_is_asked_whether_it_can_before_it_loads_anything(said: list[str]) -> None:
    assemble(config(eval=DEV))
    assert said == ["check", "load"]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"workflow": {"name": "singel_turn"}}, 'unknown workflow "singel_turn"'),
        ({"workflow": {"judger": "cuontdown"}}, 'unknown judger "cuontdown"'),
        ({"workflow": {"judger": None}}, "gives no reward and there is no judger; set workflow.judger"),
        ({"workflow": {"grouping": "by_stp"}}, 'unknown grouping "by_stp"'),
        ({"workflow": {"judger": "countdown", "judger_args": {"formt": 1}}}, "unexpected keyword argument 'formt'"),
        ({"algorithm": {"estimator": "grop"}}, 'unknown estimator "grop"'),
        ({"algorithm": {"loss": "ppo_clp"}, "backend": {"name": "local"}, "engine": {}}, 'unknown loss "ppo_clp"'),
        ({"engine": {"name": "trch"}, "backend": {"name": "local"}}, 'did you mean "torch"'),
        ({"data": {"tasks": "cuontdown"}}, 'unknown tasks "cuontdown"'),
        ({"data": {"args": {"cuont": 3}}}, "unexpected keyword argument 'cuont'"),
        ({"eval": {"sets": {"dev": {"tasks": "nowhere.jsonl"}}}}, "there is no task file"),
        ({"sft": {"coef": 0.1, "tasks": "nowhere.jsonl"}}, "there is no task file"),
        (
            {"sft": {"coef": 0.1, "tasks": "countdown_demonstrations", "args": {"count": 3}}},
            "sft.batch_size is 16, but countdown_demonstrations has only 3 demonstrations; lower it",
        ),
    ],
)
def test_what_is_wrong_is_found_before_the_model_is_loaded(
    sections: dict[str, Any], says: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backends.local.backend import LocalBackend

    monkeypatch.setattr(LocalBackend, "__init__", FakeBackend.__init__)
    with pytest.raises((ConfigError, DataError)) as raised:
        assemble(config(**sections))
    assert says in str(raised.value)
    assert "load" not in said


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_tests_that_a_program_could_forge_are_found_before_the_model_is_loaded(where: str, said: list[str]) -> None:
    good, bad = (
        [{"instruction": test, "metadata": {"tests": [test]}}] * 16
        for test in ("assert f(1) == 2", "assert eval('f(1)') == 2")
    )
    run = config(workflow={"judger": "code"}, eval=DEV)
    with pytest.raises(DataError, match=r"a program could forge .* it uses eval"):
        training, evaluation = (bad, good) if where == "training" else (good, bad)
        assemble(run, UserObjects(tasks=training, eval_tasks={"dev": evaluation}))
    assert "load" not in said


def test_tasks_for_a_set_that_the_configuration_does_not_name_are_an_error(said: list[str]) -> None:
    with pytest.raises(ConfigError, match=r'set "dve".*\(did you mean "dev"\?\); add a section \[eval\.sets\.dve\]'):
        assemble(config(eval=DEV), UserObjects(eval_tasks={"dve": [{"instruction": "a"}]}))
    assert "load" not in said


def test_tasks_given_for_a_set_go_before_those_it_names_even_if_there_are_none() -> None:
    with pytest.raises(DataError, match="tasks has no tasks"):
        assemble(config(eval=DEV), UserObjects(eval_tasks={"dev": []}))


class TrainingTasks:
    """A source that tells whether it was asked."""

    asked = 0

    def __call__(self) -> Iterator[dict[str, Any]]:
        self.asked += 1
        return iter([{"instruction": "a"}])


def test_evaluating_does_not_load_the_training_tasks() -> None:
    source = TrainingTasks()
    registry.register("tasks", "training_only", source)
    run = config(data={"tasks": "training_only"}, sft={"coef": 0.1, "tasks": "training_only"}, eval=DEV)
    parts = assemble_evaluation(run)
    assert source.asked == 0 and parts.evaluator is not None
    with pytest.raises(ConfigError):  # one task is no batch
        assemble(run)
    assert source.asked == 1


def test_headrace_eval_needs_no_training_tasks() -> None:
    metrics = evaluate_run(config(data={"tasks": "nowhere.jsonl"}, eval=DEV))
    assert metrics["eval/dev/tasks"] == 3
