"""The gateway: the model behind the HTTP APIs of OpenAI and Anthropic, so that any agent program can be trained.

    async def run(task, model):
        async with model_session(model) as session:
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
            ...

The server starts with the first session of an event loop, on loopback unless `[gateway]` says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.config import GatewaySection
from headrace.registry import load_object
from headrace.rollout.gateway.session import Session
from headrace.rollout.model_client import Model

_SERVER = "headrace.rollout.gateway.server"
_settings = GatewaySection()


@dataclass(frozen=True, slots=True)
class ModelSession:
    """Where a program reaches the model of its episode."""

    root_url: str
    """The session's URL without `/v1`: the base URL for Anthropic's clients."""
    api_key: str
    """On loopback any key is accepted; otherwise this is the token."""
    session: Session

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.root_url}/v1"

    def environment(self) -> dict[str, str]:
        """The environment variables that the clients of OpenAI and Anthropic read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


def configure(settings: GatewaySection) -> None:
    """Set the configuration of the next server of this process."""
    global _settings
    _settings = settings


@asynccontextmanager
async def model_session(model: Model) -> AsyncIterator[ModelSession]:
    """A URL for the episode's model, open as long as the block runs.

    If the episode reached a limit, or the engine failed, that error is raised here instead of the client's exception.
    """
    gateway = await load_object(f"{_SERVER}:running")(_settings)
    session: Session = gateway.open(model)
    try:
        yield ModelSession(gateway.url(session), gateway.api_key, session)
    except Exception as error:
        cause = session.fatal or session.limit
        if cause is None or cause is error:
            raise
        raise cause from error
    else:
        if session.fatal is not None:
            raise session.fatal
    finally:
        await gateway.drop(session)


async def close_gateway() -> None:
    """Stop the server of this event loop, if there is one. The next session starts another."""
    if _SERVER in sys.modules:
        await load_object(f"{_SERVER}:close_running")()
