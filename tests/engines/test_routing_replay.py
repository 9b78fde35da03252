"""Routing replay in a run: experts come from the server, are recorded, survive a crash, and the learner uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_moe import InAThread, ScriptedMoe, odd_experts

import tiny
from headrace import UnifiedTrainer, registry
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.config.rules import check_settings
from headrace.data.task import Task
from headrace.errors import ConfigError, HeadraceError
from headrace.ledger import Ledger
from headrace.rollout.model_client import Model
from headrace.trainer.replay import Replay

TASKS = [Task(id=str(number), instruction="count") for number in range(4)]


def chatty(folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty(tiny.saved_model("qwen3_moe", tmp_path_factory.mktemp("moe"), seed=3))


@pytest.fixture
def server(folder: Path) -> Iterator[ScriptedMoe]:
    running = InAThread(ScriptedMoe(folder))
    yield running.server  # type: ignore[misc]
    running.close()


async def two_turns(task: Task, model: Model) -> float:
    prompt = [5, 6, 7, 8 + int(task.id)]
    first = await model.complete(prompt)
    second = await model.complete([*prompt, *first.completion_ids, 9, 10])
    return float(sum(first.completion_ids + second.completion_ids) % 7)


def config(folder: Path, url: str, runs: Path, **backend: Any) -> RunConfig:
    return build_config(
        {
            "model": {"name": str(folder)},
            "run": {"dir": str(runs), "name": "moe"},
            "engine": {"name": "vllm", "urls": [url], "transport": "file"},
            "backend": {"routing_replay": True, "micro_batch_tokens": 64, **backend},
            "rollout": {"group_size": 2, "max_tokens": 6},
            "trainer": {"steps": 2, "batch_size": 2, "save_every": 1},
            "optimizer": {"lr": 1e-3},
            "alarm": {"warn_drift": 100, "stop_drift": 100},
        }
    )


def test_the_learner_scores_tokens_as_they_were_sampled_whatever_its_own_router_says(
    folder: Path, server: ScriptedMoe, tmp_path: Path
) -> None:
    with_it = UnifiedTrainer(config(folder, server.url, tmp_path), workflow=two_turns, tasks=TASKS).fit()
    assert with_it.metrics["drift/same_version_max"] < 1e-4
    ledger = Ledger.read(with_it.run_dir)
    steps = [step for one in ledger.episodes("train") for part in one.episode.trajectories for step in part.steps]
    assert len(steps) == 16 and min(len(step.prompt_ids) for step in steps) == 4
    for step in steps:
        assert step.routed_experts is not None
        row = [*step.prompt_ids, *step.response_ids]
        assert step.routed_experts.array().tolist() == odd_experts(row[:-1]).reshape(len(row) - 1, -1).tolist()
    ledger.close()
    without = config(folder, server.url, tmp_path, routing_replay=False)
    assert UnifiedTrainer(without, workflow=two_turns, tasks=TASKS).fit().metrics["drift/same_version_max"] > 0.1


def test_a_resumed_run_has_the_experts_of_what_was_sampled_before(
    folder: Path, server: ScriptedMoe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.backends.local.learner import Learner

    given = config(folder, server.url, tmp_path)
    usual, calls = Learner.optim_step, []

    def dies_at_the_second(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise HeadraceError("the machine is gone")
        return usual(self, *arguments)

    monkeypatch.setattr(Learner, "optim_step", dies_at_the_second)
    with pytest.raises(HeadraceError, match="the machine is gone"):
        UnifiedTrainer(given, workflow=two_turns, tasks=TASKS).fit()
    asked = len(server.said)
    result = UnifiedTrainer(given, workflow=two_turns, tasks=TASKS).fit()
    assert result.steps == 2 and len(server.said) == asked + 1  # nothing is sampled again but the first probe
    assert result.metrics["drift/same_version_max"] < 1e-4
    assert [step.same for step in Replay(result.run_dir)] == [True, True]


def test_a_server_that_does_not_return_experts_is_refused_with_the_remedy(
    folder: Path, server: ScriptedMoe, tmp_path: Path
) -> None:
    server.returns = False
    with pytest.raises(ConfigError, match="start it with --enable-return-routed-experts"):
        UnifiedTrainer(config(folder, server.url, tmp_path), workflow=two_turns, tasks=TASKS).fit()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": {"name": "torch"}}, 'it is for engines on servers \\("vllm", "sglang"\\)'),
        ({"backend": {"routing_replay": True, "name": "tinker"}}, 'backend "tinker" leaves it to the service'),
        ({"backend": {"routing_replay": True, "name": "verl"}}, "verl's own forward pass"),
        ({"backend": {"routing_replay": True, "share_prefixes": False}}, "no prefix is shared"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(changes: dict[str, Any], says: str) -> None:
    given = {"engine": {"name": "vllm"}, "backend": {"routing_replay": True}, **changes}
    with pytest.raises(ConfigError, match=says):
        check_settings(build_config(given))


def test_an_engine_of_ones_own_that_returns_no_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.backends.setup import choose
    from headrace.engines.base import EngineAbilities

    class Own:
        def abilities(self, config: RunConfig) -> EngineAbilities:
            return EngineAbilities(("file",))

    registry.register("engine", "own", Own())
    with pytest.raises(ConfigError, match='engine "own" does not return them'):
        choose(build_config({"engine": {"name": "own"}, "backend": {"routing_replay": True}}))


def test_a_dense_model_is_refused(server: ScriptedMoe, tmp_path: Path) -> None:
    folder = chatty(tiny.saved_model("llama", tmp_path / "dense"))
    with pytest.raises(ConfigError, match="needs a mixture-of-experts model"):
        UnifiedTrainer(config(folder, server.url, tmp_path), workflow=two_turns, tasks=TASKS).fit()
