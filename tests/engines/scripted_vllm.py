"""A server that answers as vLLM's does: versions, pauses, caches, weight updates, adapters and errors, on a toy model.

The toy model remembers: what it says next depends on a cache of earlier tokens, computed with the weights of their
time.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from torch import nn

from headrace.weights.vllm_plugin.headrace_vllm.checksum import checksum

VOCABULARY = 97
_WITHOUT_CORE = ("/health", "/version", "/metrics", "/openapi_json", "/v1/models", "/model_info", "/server_info")
"""What a server answers whose engine core hangs."""
_WIDTH = 24


class ToyModel(nn.Module):
    """What the learner trains."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(VOCABULARY, _WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(_WIDTH, VOCABULARY, generator=generator))

    @torch.no_grad()
    def move(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: p.detach().double().numpy().copy() for name, p in self.named_parameters()}


def logprobs_after(weights: dict[str, np.ndarray], cache: np.ndarray, token: int) -> np.ndarray:
    hidden = cache.mean(0) + 0.3 * weights["embed"][token]
    logits = hidden @ weights["head"]
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def remembered(weights: dict[str, np.ndarray], tokens: Any) -> np.ndarray:
    return np.tanh(weights["embed"][np.asarray(tokens, dtype=int)])


def row_table(weights: dict[str, np.ndarray], row: Any) -> np.ndarray:
    """[T, V]: log-probabilities after each token of a row."""
    cache = remembered(weights, row)
    return np.array([logprobs_after(weights, cache[: i + 1], token) for i, token in enumerate(row)])


@dataclass(eq=False)
class _Asked:
    """A request under way."""

    body: dict[str, Any]
    number: int
    result: asyncio.Future[dict[str, Any]]
    model: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    cache: np.ndarray | None = None

    @property
    def row(self) -> list[int]:
        return [*self.body["token_ids"], *self.ids]


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ScriptedVllm:
    """Runs in the event loop of the test. `fault` breaks it in one way; `calls` has every path that was asked for."""

    def __init__(self, weights: dict[str, np.ndarray], max_batch: int = 64, length: int = 256) -> None:
        self.weights = weights
        self.decoding = dict(weights)
        self.max_batch, self.length = max_batch, length
        self.fault = ""
        self.routes_missing: set[str] = set()
        self.calls: list[str] = []
        self.raw_logprobs = False
        self.adapters: dict[str, dict[str, np.ndarray]] = {}
        self._version, self._paused, self._updating, self._slept = "default", False, False, False
        self._arrived: dict[str, np.ndarray] = {}
        self._running: list[_Asked] = []
        self._waiting: list[_Asked] = []
        self._tokens = self._numbers = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._wake = asyncio.Event()

    async def start(self) -> ScriptedVllm:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._stepping = asyncio.create_task(self._steps())
        return self

    @property
    def busy(self) -> bool:
        """Whether a request is being decoded."""
        return any(asked.ids for asked in self._running)

    async def die(self) -> None:
        """Gone from one moment to the next, as by SIGKILL."""
        self._stepping.cancel()
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    # ---- decoding -------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            while self._paused or self.fault in ("silent", "stuck", "headless") or not (self._running or self._waiting):
                self._wake.clear()
                await self._wake.wait()
            self._waiting.sort(key=lambda one: (one.body.get("priority", 0), one.number))
            while self._waiting and len(self._running) < self.max_batch:
                self._running.append(self._waiting.pop(0))
            for asked in list(self._running):
                self._step(asked)
            await asyncio.sleep(0.0008)

    def _step(self, asked: _Asked) -> None:
        params, weights = asked.body["sampling_params"], self.adapters.get(asked.model, self.decoding)
        if asked.cache is None:
            asked.cache = remembered(weights, asked.row)
        elif len(asked.cache) < len(asked.row):
            asked.cache = np.concatenate([asked.cache, remembered(weights, asked.row[len(asked.cache) :])])
        model = logprobs_after(weights, asked.cache, asked.row[-1])
        table = _sampling_table(model, params)
        token = int(min(np.searchsorted(np.exp(table).cumsum(), self._draw(asked)), VOCABULARY - 1))
        if params["temperature"] == 0:
            token = int(model.argmax())
        greedy = params["temperature"] == 0 or self.raw_logprobs
        asked.ids.append(token)
        asked.logprobs.append(float(model[token] if greedy else table[token]))
        asked.versions.append(self._version)
        self._tokens += 1
        if token in params.get("stop_token_ids", ()) or len(asked.ids) >= params["max_tokens"]:
            stop = token in params.get("stop_token_ids", ())
            self._end(asked, "stop" if stop else "length")

    def _draw(self, asked: _Asked) -> float:
        """The random number of a token."""
        return np.random.default_rng([asked.body["sampling_params"].get("seed") or 0, len(asked.ids)]).random()

    def _end(self, asked: _Asked, reason: str) -> None:
        for queue in (self._running, self._waiting):
            if asked in queue:
                queue.remove(asked)
        if not asked.result.done():
            asked.result.set_result(self._answer(asked, reason))

    def _answer(self, asked: _Asked, reason: str) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(asked.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": i, "end": i})
            spans[-1]["end"] = i + 1
        content = [{"token_id": t, "logprob": p} for t, p in zip(asked.ids, asked.logprobs, strict=True)]
        if self.fault == "non_finite" and content:
            content[-1]["logprob"] = -9999.0
        choice = {
            "index": 0, "finish_reason": reason, "token_ids": asked.ids, "logprobs": {"content": content},
            "weight_versions": spans,
        }  # fmt: skip
        scored = None
        if asked.body["sampling_params"].get("prompt_logprobs") is not None:
            row = asked.body["token_ids"]
            table = row_table(self.adapters.get(asked.model, self.decoding), row)
            scored = [None, *({str(t): {"logprob": float(table[i, t])}} for i, t in enumerate(row[1:]))]
        return {"choices": [choice], "prompt_logprobs": scored}

    # ---- routes ---------------------------------------------------------------------------------------------------

    async def _answer_to(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        if self.fault == "silent" or (self.fault == "stuck" and path not in _WITHOUT_CORE):
            await asyncio.get_running_loop().create_future()
        if self.fault == "headless" and (path == "/health" or path not in _WITHOUT_CORE):  # its engine core is dead
            raise Refused(503 if path == "/health" else 500, "EngineCore encountered an issue")
        name = path.strip("/").replace("/", "_")
        route: Callable[..., Any] | None = getattr(self, f"_on_{name}", None)
        if route is None or path in self.routes_missing:
            raise Refused(404, "Not Found")
        self.calls.append(path)
        found = route(body, {key: values[0] for key, values in query.items()})
        return await found if asyncio.iscoroutine(found) else found

    def _on_health(self, body: Any, query: Any) -> Any:
        return {}

    def _on_version(self, body: Any, query: Any) -> Any:
        return {"version": "0.32.0"}

    def _on_openapi_json(self, body: Any, query: Any) -> Any:
        known = (
            "/pause /resume /update_weight_version /weight_info /start_weight_update /update_weights /get_world_size "
            "/finish_weight_update /sleep /wake_up /v1/load_lora_adapter /v1/unload_lora_adapter /collective_rpc"
        )
        return {"paths": {path: {} for path in {*known.split()} - self.routes_missing}}

    def _on_v1_models(self, body: Any, query: Any) -> Any:
        return {"data": [{"id": "policy", "max_model_len": self.length}]}

    def _on_get_world_size(self, body: Any, query: Any) -> Any:
        return {"world_size": 1}

    def _on_weight_info(self, body: Any, query: Any) -> Any:
        return {"weight_version": self._version}

    def _on_metrics(self, body: Any, query: Any) -> Any:
        return f'vllm:generation_tokens_total{{engine="0"}} {float(self._tokens)}\n'

    async def _on_inference_v1_generate(self, body: Any, query: Any) -> Any:
        if body["model"] != "policy" and body["model"] not in self.adapters:
            raise Refused(404, f"The model {body['model']} does not exist.")
        if len(body["token_ids"]) + body["sampling_params"]["max_tokens"] > self.length:
            raise Refused(400, "maximum context length exceeded")
        self._numbers += 1
        asked = _Asked(body, self._numbers, asyncio.get_running_loop().create_future(), body["model"])
        self._waiting.append(asked)
        self._wake.set()
        try:
            return await asked.result
        finally:
            self._end(asked, "abort")  # the client has gone, or it has ended already

    def _on_abort_requests(self, body: Any, query: Any) -> Any:
        for asked in [*self._running, *self._waiting]:
            self._end(asked, "abort")
        return {"status": "aborted"}

    def _on_pause(self, body: Any, query: dict[str, str]) -> Any:
        assert query["mode"] == "keep"
        self._paused = True
        if query.get("clear_cache") == "true":
            for asked in self._running:
                asked.cache = None
        return {"status": "paused"}

    def _on_resume(self, body: Any, query: Any) -> Any:
        self._paused = False
        self._wake.set()
        return {"status": "resumed"}

    def _on_reset_prefix_cache(self, body: Any, query: Any) -> Any:
        return {"success": True}

    def _on_sleep(self, body: Any, query: dict[str, str]) -> Any:
        self._slept = self._paused = True
        for asked in self._running:
            asked.cache = None
        return {"status": "sleeping"}

    def _on_wake_up(self, body: Any, query: Any) -> Any:
        self._slept = self._paused = False  # as vLLM's does
        self._wake.set()
        return {"status": "awake"}

    # ---- weights --------------------------------------------------------------------------------------------------

    def _on_init_weight_transfer_engine(self, body: Any, query: Any) -> Any:
        return {}

    def _on_start_weight_update(self, body: Any, query: Any) -> Any:
        if self._updating or not self._paused or self._slept:
            raise Refused(500, "a weight update needs a paused server that is awake, and one at a time")
        self._updating, self._arrived = True, {}
        return {}

    async def _on_update_weights(self, body: Any, query: Any) -> Any:
        if not self._updating:
            raise Refused(500, "start_weight_update must be called before update_weights.")
        if self.fault == "dies":
            await self.die()
            await asyncio.sleep(60)
        info = body["update_info"]
        await asyncio.to_thread(self._read, info)
        return {}

    def _read(self, info: dict[str, Any]) -> None:
        file = os.open(info["path"], os.O_RDWR)
        content = torch.frombuffer(mmap.mmap(file, info["size"]), dtype=torch.uint8)
        os.close(file)
        sums = []
        for name, dtype_name, shape, start in zip(
            info["names"], info["dtype_names"], info["shapes"], info["starts"], strict=True
        ):
            dtype = getattr(torch, dtype_name)
            tensor = content[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            if self.fault == "drops" and name == "head":
                sums.append(0)
                continue
            sums.append(checksum(tensor))
            self._arrived[name] = tensor.double().numpy().copy()
        first = info["receipts"]
        content[first : first + 8 * len(sums)].view(torch.int64).copy_(torch.tensor(sums))

    def _on_finish_weight_update(self, body: Any, query: Any) -> Any:
        if not self._updating:
            raise Refused(500, "finish_weight_update called without a matching start_weight_update.")
        self._updating = False
        kept = {"nothing": (*self.weights,), "stale_head": ("head",)}.get(self.fault, ())
        self.decoding = {**self.decoding, **{n: w for n, w in self._arrived.items() if n not in kept}}
        return {}

    def _on_update_weight_version(self, body: Any, query: Any) -> Any:
        self._version = body["new_version"]
        return {"success": True}

    # ---- HTTP -----------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                method, target, _ = first.split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._respond(reader, writer, method, target, raw)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _respond(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, target: str, raw: bytes
    ) -> None:
        parts = urlsplit(target)
        work = asyncio.ensure_future(
            self._answer_to(method, parts.path.replace(".", "_"), parse_qs(parts.query), json.loads(raw or b"null"))
        )
        left = asyncio.ensure_future(reader.read(1))  # a client that goes away cancels its request
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                raise ConnectionError
        finally:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        try:
            body, status = work.result(), 200
        except Refused as refused:
            body, status = {"error": {"message": str(refused)}}, refused.status
        text = body if isinstance(body, str) else json.dumps(body)
        kind = "text/plain" if isinstance(body, str) else "application/json"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(text.encode())}\r\n\r\n"
        writer.write(head.encode() + text.encode())
        await writer.drain()


def _sampling_table(model: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """By definition: scale, keep the k likeliest, of those the smallest set with mass top_p, renormalise."""
    from contracts.engine_harness import sampling_logprobs

    temperature = params["temperature"] or 1.0
    return sampling_logprobs(model[None], temperature, params.get("top_k") or 0, params.get("top_p") or 1.0)[0]
