"""One session with a Tinker service: keys, models, and errors that name the call."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

import tinker
from tinker import types

from headrace.config import RunConfig, TinkerSection
from headrace.errors import BackendError, ConfigError, HeadraceError
from headrace.registry import nearest

T = TypeVar("T")
_ANSWER_S = 10.0
_GONE = "; if the server was started again, the same command resumes the run from its newest checkpoint"
_NO_KEY = "tml-none"  # the SDK sends no request without one; a service on this machine may not ask for it


def base_model(config: RunConfig) -> str:
    """What the service calls the model that is trained."""
    return config.tinker.model or config.model.name


def address(section: TinkerSection) -> tuple[str | None, str | None]:
    """Where the service is (None: where the SDK has it) and the key for it; ConfigError if one is missing or wrong."""
    url = section.base_url or os.environ.get("TINKER_BASE_URL") or None
    key = os.environ.get(section.api_key_env) or None
    if key is None and url is not None and _is_here(url):
        key = _NO_KEY
    if key is None and (url is None or section.api_key_env != "TINKER_API_KEY"):
        raise ConfigError(
            f"{section.api_key_env} (tinker.api_key_env) is not set; export a key of the service, or, for a server of "
            f"your own (headrace serve tinker), its address as TINKER_BASE_URL or tinker.base_url"
        )
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ConfigError(f'the address of the Tinker service must begin with http:// or https://, got "{url}"')
    return url, key


def connect(section: TinkerSection) -> tinker.ServiceClient:
    """A client of the service; nothing is sent yet."""
    url, key = address(section)
    if url is not None:
        _require_answer(url)
    with calling(f"connecting to {url or 'the Tinker service'}"):
        return blocking(lambda: tinker.ServiceClient(base_url=url, api_key=key))


def _require_answer(url: str) -> None:
    """The SDK tries for five minutes to reach a service; a port that nothing listens on is reported immediately."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), _ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            f"nothing answers at {url}: {error}; start the server (headrace serve tinker), or correct TINKER_BASE_URL "
            f"or tinker.base_url"
        ) from None


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def context_length(service: tinker.ServiceClient, model: str) -> int | None:
    """The longest sequence that the service accepts, if known; for an unknown model, an error that lists the others."""
    with calling("get_server_capabilities"):
        supported = blocking(service.get_server_capabilities).supported_models
    known = {one.model_name: one for one in supported if one.model_name and one.trainable is not False}
    if known and model not in known:
        raise ConfigError(
            f'the service does not train a model "{model}"{nearest(model, known)}; '
            f"set tinker.model to one of {', '.join(sorted(known))}"
        )
    return known[model].max_context_length if model in known else None


def new_training(service: tinker.ServiceClient, config: RunConfig) -> tinker.TrainingClient:
    """Fresh adapters on the base model, or those of a saved state."""
    section, model = config.tinker, base_model(config)
    if section.state:
        return training_from(service, section.state, section.state_optimizer)
    with calling(f'create_model of "{model}" with rank {section.rank}'):
        return blocking(
            lambda: service.create_lora_training_client(
                model,
                rank=section.rank,
                seed=config.run.seed,
                train_attn=section.train_attn,
                train_mlp=section.train_mlp,
                train_unembed=section.train_unembed,
            )
        )


def training_from(service: tinker.ServiceClient, path: str, optimizer: bool = True) -> tinker.TrainingClient:
    """A model that continues from a saved state."""
    make = (
        service.create_training_client_from_state_with_optimizer
        if optimizer
        else service.create_training_client_from_state
    )
    with calling(f"load_weights from {path}"):
        return blocking(lambda: make(path))


def model_info(training: tinker.TrainingClient) -> types.GetInfoResponse:
    """What the service says of the model that is trained."""
    with calling("get_info", training.model_id):
        return blocking(training.get_info)


def blocking(call: Callable[[], T]) -> T:
    """Call the SDK from a plain thread: it refuses to wait on one that has an event loop."""
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(call).result()


async def in_thread(doing: str, call: Callable[[], T], where: str = "") -> T:
    """As `blocking`, without holding the event loop up."""
    with calling(doing, where):
        return await asyncio.to_thread(call)


async def answer(doing: str, future: Awaitable[T], where: str = "") -> T:
    """What a call that was submitted comes to."""
    with calling(doing, where):
        return await future


@contextmanager
def calling(doing: str, where: str = "", error: type[HeadraceError] = BackendError) -> Iterator[None]:
    """Turn a failure of the SDK or the service into an error with the call, the model and the request's id.

    The SDK has tried again by then, where that could help.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as cause:
        request = getattr(cause, "request_id", None)
        at = f" of {where}" if where else ""
        at += f", request {request}" if request else ""
        gone = _GONE if getattr(cause, "status_code", None) == 404 or "Error code: 404" in str(cause) else ""
        raise error(f"Tinker: {doing}{at} failed: {type(cause).__name__}: {cause}{gone}") from cause
