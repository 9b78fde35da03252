"""What the sending side asks of a server: to join a transfer, to receive. Plain calls over HTTP, from any process."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from headrace.errors import ServerLostError, WeightSyncError
from headrace.weights.base import Endpoint

_TIMEOUT_S = 600.0
_SHOWN = 600


def call(endpoint: Endpoint, path: str, body: Any = None, timeout_s: float = _TIMEOUT_S) -> Any:
    """POST; ServerLostError if nobody is there, WeightSyncError if the server says no."""
    url = endpoint.url.rstrip("/") + path
    headers = {"Content-Type": "application/json", **dict(endpoint.headers)}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers, method="POST")
    try:
        with _direct().open(request, timeout=timeout_s) as response:
            text = response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:_SHOWN]
        raise WeightSyncError(f"{url} answered {error.code}: {said}") from None
    except (OSError, http.client.HTTPException) as error:  # URLError among them
        raise ServerLostError(f"{url} gave no answer: {getattr(error, 'reason', error)}", endpoint.url) from None
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


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


CONTROLS: dict[str, Callable[[Endpoint], VllmControl]] = {"vllm": VllmControl}
"""By `Endpoint.protocol`."""


def control(endpoint: Endpoint) -> VllmControl:
    """What talks to this endpoint."""
    return CONTROLS[endpoint.protocol](endpoint)
