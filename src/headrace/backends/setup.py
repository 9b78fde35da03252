"""From a configuration to a backend, an engine and the weight sync between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.backends.base import Backend
from headrace.config import RunConfig
from headrace.engines.base import EngineAbilities, EngineFactory, ModelHost, RolloutEngine
from headrace.errors import ConfigError, MissingExtraError
from headrace.registry import names, resolve
from headrace.weights.canary import TOLERANCES, Canary, canary_rows
from headrace.weights.sync import WeightSync

_OWN_ENGINE = {"tinker": "tinker"}
"""By backend, what the default engine "torch" stands for where the backend's weights never come to this machine."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's class and an engine's factory that fit each other. Nothing is loaded yet."""

    new_backend: Any
    new_engine: EngineFactory
    transport: str
    abilities: EngineAbilities


@dataclass(frozen=True, slots=True)
class Policy:
    """The model in training: who trains it, who samples from it, and what brings the weights across."""

    backend: Backend
    engine: RolloutEngine
    sync: WeightSync


def choose(config: RunConfig) -> Choice:
    """Look up backend and engine, and check that they can do what is configured, together."""
    backend = resolve("backend", config.backend.name)
    backend.check(config)
    name = config.engine.name
    if name == "torch":
        name = _OWN_ENGINE.get(config.backend.name, name)
    factory: EngineFactory = resolve("engine", name)
    abilities = _abilities(name, factory, config)
    for problem in _problems(name, abilities, config):
        raise ConfigError(problem)
    sent_by: tuple[str, ...] = getattr(backend, "transports", ())
    shared = [transport for transport in abilities.transports if transport in sent_by]
    if not shared:
        raise ConfigError(
            f'engine "{name}" takes weights by {_listed(abilities.transports)}, and backend "{config.backend.name}" '
            f"sends them by {_listed(sent_by)}; {_remedy(config, sent_by)}"
        )
    return Choice(backend, factory, shared[0], abilities)


def attach_engine(config: RunConfig, backend: Backend, choice: Choice) -> Policy:
    """Give a backend its engine, and the weight sync between the two."""
    host = backend.host(choice.transport)
    if config.model.dtype == "auto" and host.dtype is not None:  # a server would take "auto" for the file's own
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": host.dtype})})
    canary = None if choice.abilities.digests else _canary(config, host)
    engine = choice.new_engine(config, host)
    sync = WeightSync(host.weights, host.sender, engine, canary, choice.abilities.pauses_to_sync)
    return Policy(backend, engine, sync)


def _canary(config: RunConfig, host: ModelHost) -> Canary:
    """What proves a sync to an engine that cannot take a digest of what it decodes with."""
    if host.score is None or host.vocabulary is None:
        raise ConfigError(
            f'engine "{config.engine.name}" proves a weight sync by rows that the learner scores too, and backend '
            f'"{config.backend.name}" scores none; use another engine or another backend'
        )
    tolerance = config.engine.sync_tolerance or TOLERANCES[config.model.dtype]
    length = min(filter(None, (host.max_length, config.engine.max_model_length)), default=None)
    return Canary(canary_rows(host.vocabulary, length), host.score, tolerance)


def _abilities(name: str, factory: Any, config: RunConfig) -> EngineAbilities:
    if not callable(getattr(factory, "abilities", None)):
        raise ConfigError(
            f'engine "{name}" has no abilities(config), so nothing is known of what it can do; name an engine factory '
            f"(docs/engine.md), or one of {', '.join(names('engine'))}"
        )
    return factory.abilities(config)


def _problems(name: str, abilities: EngineAbilities, config: RunConfig) -> Iterator[str]:
    """What the run needs of its engine, and the engine cannot do."""
    if config.run.deterministic and not abilities.exact_seeds:
        yield (
            f'run.deterministic = true needs an engine whose tokens depend on the seed alone, and those of "{name}" do '
            f"not; set run.deterministic = false, or use another engine"
        )
    if config.eval.every and config.eval.sets and config.trainer.max_staleness and not abilities.pins:
        yield (
            f"eval.every = {config.eval.every} with trainer.max_staleness = {config.trainer.max_staleness} evaluates "
            f'one version while newer ones are served, and engine "{name}" has only one at a time; set eval.every = 0 '
            f"and evaluate the run with headrace eval, or trainer.max_staleness = 0, or use two engine.replicas"
        )
    if config.backend.routing_replay and not abilities.routed_experts:
        yield (
            f'backend.routing_replay = true needs the experts that tokens were sampled with, and engine "{name}" does '
            f'not return them; set it to false, or engine.name = "vllm" or "sglang"'
        )
    cache = config.engine.cache_on_publish
    if config.trainer.max_staleness and config.trainer.partial_rollouts and cache not in abilities.cache_on_sync:
        possible = " or ".join(f'"{one}"' for one in abilities.cache_on_sync)
        yield (
            f'engine.cache_on_publish = "{cache}" is more than engine "{name}" can do with sequences in flight; '
            f"{f'set it to {possible}' if possible else 'set trainer.partial_rollouts = false'}, or use another engine"
        )


def _remedy(config: RunConfig, sent_by: tuple[str, ...]) -> str:
    fitting = [name for name in names("engine") if _fits(name, config, sent_by)]
    return f'set engine.name = "{fitting[0]}"' if fitting else "use another engine or another backend"


def _fits(name: str, config: RunConfig, sent_by: tuple[str, ...]) -> bool:
    try:
        abilities = _abilities(name, resolve("engine", name), config)
    except (ConfigError, MissingExtraError):
        return False
    return not {*abilities.transports}.isdisjoint(sent_by)


def _listed(transports: tuple[str, ...]) -> str:
    return " or ".join(transports) or "no transport"
