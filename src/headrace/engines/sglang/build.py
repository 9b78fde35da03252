"""From a configuration to an engine of SGLang servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import RunConfig
from headrace.engines.base import ModelHost, RolloutEngine
from headrace.engines.servers.build import ServerKind, build_servers, memory_share
from headrace.engines.servers.checks import interpreter
from headrace.engines.servers.life import ServerOptions
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.factory import transports
from headrace.models.catalog import resolve_model
from headrace.utils.child_environment import expanded


def build_engine(config: RunConfig, host: ModelHost) -> RolloutEngine:
    """One engine per server; the sender is bound to where they are."""
    return build_servers(config, host, SGLANG)


@dataclass(frozen=True, slots=True)
class SglangLaunch:
    """What a server is started with."""

    config: RunConfig
    options: ServerOptions

    def command(self, port: int) -> Sequence[str]:
        section = self.config.engine
        options: dict[str, object] = {
            "model-path": str(resolve_model(self.config.model.name)),
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.config.model.dtype,
            "context-length": self.options.max_model_length + 1,  # scoring a row samples one token behind it
            "max-running-requests": section.max_batch,
            "enable-metrics": True,
            "enable-memory-saver": self.options.sleeps,
            "enable-return-routed-experts": self.options.routed_experts,
            "mem-fraction-static": memory_share(self.config, "--mem-fraction-static"),
        }
        made = [interpreter(section.python, "SGLang") or sys.executable, "-m", "sglang.launch_server"]
        for name, value in options.items():
            if value is None or value is False or f"--{name}" in section.server_args:  # one's own argument wins
                continue
            made += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return [*made, *section.server_args]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **expanded(self.config.engine.server_env, "engine.server_env")}


SGLANG = ServerKind("sglang", "SGLang", SglangEngine, SglangLaunch, transports)
