"""Backend and engine are chosen by name, and must fit each other before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeEngine, FakeEngines, FakeHost
from headrace import registry
from headrace.backends.setup import attach_engine, choose
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.engines.base import EngineAbilities, ModelHost
from headrace.errors import ConfigError

DEV = {"every": 1, "sets": {"dev": {"tasks": "countdown"}}}


class AnyBackend(FakeHost):
    """Refuses nothing."""

    def __init__(self, config: RunConfig) -> None: ...

    @staticmethod
    def check(config: RunConfig) -> None: ...


class SilentBackend:
    """Names no transport."""

    @staticmethod
    def check(config: RunConfig) -> None: ...


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {
        "mine": FakeEngines(),
        "by_file": FakeEngines(can=EngineAbilities(("pigeon", "balloon"))),
        "by_chance": FakeEngines(can=EngineAbilities(("in_place",), exact_seeds=False)),
        "one_version": FakeEngines(can=EngineAbilities(("in_place",), pins=False)),
        "either": FakeEngines(can=EngineAbilities(("pigeon", "in_place"))),
        "no_factory": object(),
    }
    found = {("engine", name): one for name, one in engines.items()}
    backends = {("backend", "any"): AnyBackend, ("backend", "silent"): SilentBackend}
    monkeypatch.setattr(registry, "_registered", {**found, **backends})
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


def config(engine: str, backend: str = "any", **sections: Any) -> RunConfig:
    return build_config({"backend": {"name": backend}, "engine": {"name": engine}, **sections})


def test_the_engine_is_the_one_that_is_named_and_gets_the_backends_host() -> None:
    hosts: list[ModelHost] = []

    class Mine(FakeEngine):
        def __init__(self, config: RunConfig, host: ModelHost) -> None:
            hosts.append(host)
            super().__init__()

        @staticmethod
        def abilities(config: RunConfig) -> EngineAbilities:
            return EngineAbilities(("in_place",))

    registry.register("engine", "a_class", Mine)
    chosen = config("a_class")
    backend: Any = AnyBackend(chosen)
    policy = attach_engine(chosen, backend, choose(chosen))
    assert type(policy.engine) is Mine and hosts[0].tokenizer is backend.tokenizer
    assert policy.backend is backend and policy.sync.in_place


def test_of_several_transports_the_engines_first_that_the_backend_has_is_taken() -> None:
    assert choose(config("either")).transport == "in_place"
    assert choose(config("torch", "local")).transport == "in_place"
    assert choose(config("torch", "local", trainer={"placement": "separate"})).transport == "shared_memory"


@pytest.mark.parametrize("engine", ["torch", "tinker"])
def test_backend_tinker_has_its_own_engine_by_default(engine: str) -> None:
    assert choose(config(engine, "tinker")).transport == "tinker_path"


@pytest.mark.parametrize(
    ("engine", "backend", "sections", "says"),
    [
        ("trch", "local", {}, 'unknown engine "trch" (did you mean "torch"?)'),
        ("no_factory", "any", {}, 'engine "no_factory" has no abilities(config)'),
        ("by_file", "local", {}, 'takes weights by pigeon or balloon, and backend "local" sends them by in_place or'),
        ("by_file", "any", {}, 'set engine.name = "by_chance"'),
        ("tinker", "local", {}, 'takes weights by tinker_path, and backend "local"'),
        ("torch", "silent", {}, 'backend "silent" sends them by no transport; use another engine or another backend'),
        ("by_file", "tinker", {}, 'sends them by tinker_path; set engine.name = "tinker"'),
        ("by_chance", "any", {"run": {"deterministic": True}}, "run.deterministic = true needs an engine whose"),
        ("one_version", "any", {"eval": DEV, "trainer": {"max_staleness": 1}}, "set eval.every = 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(
    engine: str, backend: str, sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose(config(engine, backend, **sections))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ("by_chance", {}),
        ("one_version", {"eval": DEV}),
        ("one_version", {"trainer": {"max_staleness": 1}}),
        ("mine", {"eval": DEV, "trainer": {"max_staleness": 1}, "run": {"deterministic": True}}),
    ],
)
def test_an_engine_need_not_be_able_to_do_what_the_run_does_not_ask_for(engine: str, sections: dict[str, Any]) -> None:
    assert choose(config(engine, **sections)).transport == "in_place"


def test_the_torch_engine_says_which_sender_it_needs() -> None:
    from headrace.engines.builtin import torch_engine

    for placement, kind in (("colocate", "InPlace"), ("separate", "SharedBuffers")):
        config = build_config({"trainer": {"placement": placement}})
        host = AnyBackend(config).host("in_place")
        with pytest.raises(ConfigError, match=rf'engine "torch" needs a backend whose sender is .*:{kind}'):
            torch_engine(config, host)
