"""What the sending side asks of a server: to join a transfer, to receive. Plain calls over HTTP, from any process."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

from headrace.errors import ServerLostError, WeightSyncError
from headrace.weights.base import Endpoint

_TIMEOUT_S = 600.0
_HEALTH_S = 10.0
_SHOWN = 600
SGLANG_GROUP = "headrace"


def call(endpoint: Endpoint, path: str, body: Any = None, timeout_s: float = _TIMEOUT_S) -> Any:
    """POST; ServerLostError if nobody is there, or nobody who is well; WeightSyncError if the server says no."""
    url = endpoint.url.rstrip("/") + path
    headers = {"Content-Type": "application/json", **dict(endpoint.headers)}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers, method="POST")
    try:
        with _direct().open(request, timeout=timeout_s) as response:
            text = response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        found = f"{url} answered {error.code}: {error.read().decode(errors='replace')[:_SHOWN]}"
        if error.code >= 500 and not _is_well(endpoint):  # its engine died under it
            raise ServerLostError(found, endpoint.url) from None
        raise WeightSyncError(found, endpoint.url) from None
    except (OSError, http.client.HTTPException) as error:  # URLError among them
        raise ServerLostError(f"{url} gave no answer: {getattr(error, 'reason', error)}", endpoint.url) from None
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _is_well(endpoint: Endpoint) -> bool:
    request = urllib.request.Request(endpoint.url.rstrip("/") + "/health", headers=dict(endpoint.headers))
    try:
        with _direct().open(request, timeout=_HEALTH_S):
            return True
    except (OSError, http.client.HTTPException):  # HTTPError among them
        return False


def _direct() -> urllib.request.OpenerDirector:
    """Without proxies: servers are machines of one's own."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


class VllmControl:
    """vLLM's routes for weight transfer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def join(self, info: dict[str, Any]) -> None:
        """Join the transfer group, or hear how tensors will come."""
        call(self._endpoint, "/init_weight_transfer_engine", {"init_info": info})

    def receive(self, info: dict[str, Any]) -> None:
        """Receive what is sent meanwhile, or take what lies ready."""
        call(self._endpoint, "/update_weights", {"update_info": info})

    def reload(self, folder: str) -> None:
        """Load a folder in Hugging Face format."""
        arguments = {"weights_path": folder, "is_checkpoint_format": True}
        call(self._endpoint, "/collective_rpc", {"method": "reload_weights", "kwargs": arguments})


class SglangControl:
    """SGLang's routes for weight updates. The cache is flushed by the engine, once all weights are there."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def join(self, info: dict[str, Any]) -> None:
        """Join a group of torch.distributed."""
        self._call("/init_weights_update_group", info)

    def receive(self, info: dict[str, Any]) -> None:
        """Receive what is broadcast meanwhile."""
        named = {"names": info["names"], "dtypes": info["dtype_names"], "shapes": info["shapes"]}
        self._call("/update_weights_from_distributed", {**named, "group_name": SGLANG_GROUP, "flush_cache": False})

    def reload(self, folder: str) -> None:
        """Load a folder in Hugging Face format."""
        self._call("/update_weights_from_disk", {"model_path": folder, "flush_cache": False})

    def _call(self, path: str, body: dict[str, Any]) -> None:
        answer = call(self._endpoint, path, body)
        if not (isinstance(answer, dict) and answer.get("success")):
            url = self._endpoint.url
            raise WeightSyncError(f"{url}{path} failed: {str(answer)[:_SHOWN]}", url)


class Control(Protocol):
    """What the sending side asks of a server of any kind."""

    def join(self, info: dict[str, Any]) -> None: ...
    def receive(self, info: dict[str, Any]) -> None: ...
    def reload(self, folder: str) -> None: ...


CONTROLS: dict[str, Callable[[Endpoint], Control]] = {"vllm": VllmControl, "sglang": SglangControl}
"""By `Endpoint.protocol`."""


def control(endpoint: Endpoint) -> Control:
    """What talks to this endpoint."""
    return CONTROLS[endpoint.protocol](endpoint)
