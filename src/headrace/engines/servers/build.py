"""From a configuration to engines of servers, of whichever kind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.config import RunConfig
from headrace.config.derived import places_engines, shares_bundles, starts_beside
from headrace.engines.base import ModelHost, RolloutEngine, SamplingParams
from headrace.engines.http import authorization
from headrace.engines.pool import EnginePool
from headrace.engines.servers.checks import interpreter, require_package
from headrace.engines.servers.client import ServerClient
from headrace.engines.servers.engine import ServerEngine
from headrace.engines.servers.life import ServerOptions
from headrace.engines.servers.server import GivenServer, Server, StartedServer
from headrace.errors import ConfigError
from headrace.models.device import describe, resolve_device
from headrace.models.plan import read_shape, server_share
from headrace.registry import load_object
from headrace.weights.sender import ServerSender

_MOST = 1 << 30


_BUNDLES = "headrace.engines.servers.on_ray:RayBundles"


class Bundles(Protocol):
    """Where servers are started on a cluster."""

    def server(self, number: int, name: str, launch: Any, log: Path, ask: Callable[[], object]) -> Server:
        """A server that is not started yet."""
        ...

    def release(self) -> None:
        """Give the resources back."""
        ...


class LaunchedServer(Protocol):
    """How a server is started."""

    def command(self, port: int) -> Sequence[str]: ...
    def environment(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What differs between the servers of one project and of another."""

    name: str
    shown: str
    engine: type[ServerEngine]
    launch: Callable[[RunConfig, ServerOptions], LaunchedServer]
    transports: Callable[[RunConfig], tuple[str, ...]]


def build_servers(config: RunConfig, host: ModelHost, kind: ServerKind) -> RolloutEngine:
    """Engines of servers of one kind, alone or in a pool."""
    if not isinstance(host.sender, ServerSender) or host.vocabulary is None:
        raise ConfigError(
            f'engine "{kind.name}" needs a backend that sends to servers, got {type(host.sender).__name__}; return a '
            f"ServerSender from the backend's host(), or set engine.name to another engine"
        )
    count = config.engine.servers
    on_ray = places_engines(config) or shares_bundles(config)
    options = _options(config, host, kind.transports(config)[0], waits=count == 1 and not on_ray)
    bundles: Bundles | None = load_object(_BUNDLES)(config) if on_ray else None
    engines = [_engine(config, options, kind, number, bundles) for number in range(count)]
    engine = engines[0]
    if count > 1 or bundles is not None:
        # with adapters, servers have several versions side by side, and all of them pin
        release = bundles.release if bundles is not None else lambda: None
        engine = EnginePool(engines, pins_one=not config.model.lora.rank, release=release)
    host.sender.bind(engine.endpoints)
    return engine


def _engine(
    config: RunConfig, options: ServerOptions, kind: ServerKind, number: int, bundles: Bundles | None
) -> ServerEngine:
    made: list[Server] = []

    def client() -> ServerClient:
        return ServerClient(made[0].url, _headers(config, made[0]), config.engine.hang_timeout_s)

    async def ask() -> None:
        one = client()
        try:
            await one.get("/health", 5.0)
        finally:
            await one.close()

    made.append(_server(config, options, kind, number, ask, bundles))
    return kind.engine(made[0], client, options)


def _headers(config: RunConfig, server: Server) -> dict[str, str]:
    if config.engine.urls:
        return authorization(config.engine.api_key_env)
    token = getattr(server, "token", "")  # of one on a cluster, which others reach as well
    return {"Authorization": f"Bearer {token}"} if token else {}


def _server(
    config: RunConfig, options: ServerOptions, kind: ServerKind, number: int, ask: Callable[[], Any],
    bundles: Bundles | None,
) -> Server:  # fmt: skip
    section = config.engine
    if section.urls:
        return GivenServer(section.urls[number], ask, section.start_timeout_s)
    if bundles is None and number == 0:
        require_package(interpreter(section.python, kind.shown), kind.name, kind.shown)
    launch = kind.launch(config, options)
    log = _logs(config) / f"{kind.name}_{number}.log"
    name = f"{kind.shown} server {number}"
    if bundles is not None:
        return bundles.server(number, name, launch, log, ask)
    visible = {"CUDA_VISIBLE_DEVICES": section.gpus[number]} if section.gpus else {}
    environment = launch.environment() | visible
    return StartedServer(name, launch.command, environment, log, ask, section.start_timeout_s)


def _logs(config: RunConfig) -> Path:
    """In the run's folder; elsewhere for what has none, such as an evaluation."""
    folder = config.run.dir / config.run.name
    return folder / "engines" if folder.is_dir() else Path(tempfile.mkdtemp(prefix="headrace-engines-"))


def _options(config: RunConfig, host: ModelHost, transport: str, waits: bool) -> ServerOptions:
    section, tokenizer = config.engine, host.tokenizer
    return ServerOptions(
        vocabulary=host.vocabulary or len(tokenizer),
        max_model_length=_length(section.max_model_length, host.max_length),
        eos_ids=host.eos_ids,
        detokenize=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        defaults=SamplingParams(max_tokens=config.rollout.max_tokens),
        max_batch=section.max_batch,
        recompute=section.cache_on_publish == "recompute",
        sleeps=config.trainer.placement == "colocate",
        transport=transport,
        health_every_s=section.health_every_s,
        hang_s=section.hang_timeout_s,
        waits=waits,
        routed_experts=config.backend.routing_replay,
    )


def memory_share(config: RunConfig, argument: str) -> float | None:
    """The part of the learner's GPU that a server beside it may take, by the plan of `headrace doctor --plan`.

    None if `argument` says so already, or if they share no GPU.
    """
    memory = device_memory(config)
    own = any(given.partition("=")[0] == argument for given in config.engine.server_args)
    if memory is None or own or not starts_beside(config):
        return None
    return server_share(config, read_shape(config.model.name), memory)


def device_memory(config: RunConfig) -> float | None:
    """Bytes of the learner's GPU; None without one."""
    device = resolve_device(config.model.device)
    return describe(device).memory if device.type == "cuda" else None


def _length(wanted: int | None, longest: int | None) -> int:
    """One less than the model reads: scoring a row samples a token behind it, which must fit as well."""
    if wanted is None and longest is None:
        raise ConfigError("the backend does not say how much the model reads; set engine.max_model_length")
    most = (longest or _MOST) - 1
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"engine.max_model_length is {wanted}, but servers use at most {most} of the {longest} tokens that "
            f"the model reads; lower it, or leave it out to take the model's limit"
        )
    return wanted or most
