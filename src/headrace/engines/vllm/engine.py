"""VllmEngine: one vLLM server behind the engine protocol.

A weight sync pauses the server between two tokens, so sequences in flight continue with the new weights, and every
token's version comes back with it. Adapters have a name per version; a request keeps those that it was asked of.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headrace.engines.base import Generation
from headrace.engines.request import Request
from headrace.engines.servers.client import ServerClient, ServerRefusedError
from headrace.engines.servers.engine import ServerEngine
from headrace.engines.servers.facts import ServerFacts, require_length
from headrace.engines.servers.life import LONGEST_REPLY_S, ServerOptions
from headrace.engines.servers.server import Server
from headrace.engines.vllm.checks import inspect_server
from headrace.engines.vllm.messages import (
    AbortedError,
    generate_body,
    row_logprobs,
    score_body,
    score_token_body,
    take_answer,
    token_logprob,
)
from headrace.errors import EngineError, ServerLostError
from headrace.weights.names import adapter_name

_ABORTED_S = 0.01


class VllmEngine(ServerEngine):
    """Made on any thread; from its first call on it belongs to the event loop of that call."""

    kind = "vllm"
    tokens_pattern = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)

    def __init__(self, server: Server, client: Callable[[], ServerClient], options: ServerOptions) -> None:
        super().__init__(server, client, options)
        self._facts: ServerFacts | None = None
        self._adapters = options.transport == "adapter"
        self._loaded: set[int] = set()  # versions whose adapters the server has
        self._unloading: set[asyncio.Task[None]] = set()

    # ---- sampling -------------------------------------------------------------------------------------------------

    async def _generation(self, request: Request, pinned: bool) -> Generation:
        while True:
            await self._opened()
            await self._up.wait()
            life, version = self._life(), self._version_for(pinned)
            self._in_flight[request] = version
            try:
                body = self._body(request, version, pinned)
                answer = await self._client.post("/inference/v1/generate", body, LONGEST_REPLY_S)
                one = version if self._adapters else None
                reason = take_answer(request, answer, one, self.server.url, self._options.routed_experts)
            except AbortedError:
                self._reissued += 1
                request.start_over()
                await asyncio.sleep(_ABORTED_S)
                continue
            except (ServerLostError, ServerRefusedError) as error:
                await self._asked_in_vain(life, error)
                request.start_over()
                continue
            self.server.answered()
            self._count_answer(len(request.ids))
            await self._going.wait()  # nothing is delivered between a sync and its proof
            if life != self._life():  # an answer of a server that was lost since, with weights nobody vouches for
                request.start_over()
                self._reissued += 1
                continue
            return request.generation(reason)

    def _body(self, request: Request, version: int, pinned: bool) -> dict[str, Any]:
        assert self._facts is not None
        priority = -1 if pinned and self._facts.priorities else 0
        return generate_body(request, self._model(version), f"v{version}", self._options.server_stops, priority)

    def _version_for(self, pinned: bool) -> int:
        return self._pinned if pinned and self._adapters and self._pinned is not None else self._version

    def _model(self, version: int) -> str:
        """What the server calls the weights of a version."""
        assert self._facts is not None
        if not self._adapters or not self._synced:
            return self._facts.model
        if version not in self._loaded:
            raise EngineError(f"the adapters of version {version} were lost with the server that had them")
        return adapter_name(version)

    async def _score(self, row: Sequence[int]) -> list[float]:
        if len(row) < 2:
            return []
        model, path, url = self._model(self._version), "/inference/v1/generate", self.server.url
        if not self._adapters:
            return row_logprobs(row, await self._post(path, score_body(row, model)), url)
        places = range(1, len(row))
        answers = await asyncio.gather(*(self._post(path, score_token_body(row, at, model)) for at in places))
        return [token_logprob(row[at], answer, url) for at, answer in zip(places, answers, strict=True)]

    async def _hold(self) -> None:
        await self._post("/pause?mode=keep&clear_cache=false")

    async def _let_go(self) -> None:
        await self._post("/resume")

    async def _abort_all(self) -> None:
        await self._post("/abort_requests", {})

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        if len(self._loaded) > 1 and not self._closed.is_set():
            self._unload_unused()

    # ---- the server -----------------------------------------------------------------------------------------------

    async def _revive(self) -> None:
        asleep = ("/wake_up",) if self._options.sleeps else ()
        updating = ("/finish_weight_update",) if self._transfers else ()  # or some layers would be empty
        for path in (*asleep, *updating, "/resume"):
            with suppress(ServerRefusedError):  # nothing to finish; or it lacks the call, which is found out next
                await self._client.post(path)

    async def _inspect(self) -> None:
        options = self._options
        facts = await inspect_server(self._client, options.transport, options.sleeps, options.routed_experts)
        require_length(facts.max_model_length, self.max_model_length, self.server.url, "--max-model-len")
        self._facts = facts

    async def _name_version(self, version: int) -> None:
        await self._client.post("/update_weight_version", {"new_version": str(version)})

    @property
    def _world_size(self) -> int:
        assert self._facts is not None, "begin_update comes before a sender asks where to send"
        return self._facts.world_size

    @property
    def _kept(self) -> int | None:
        if not self._adapters or not self._synced:
            return super()._kept
        return self._pinned if self._pinned in self._loaded else None

    def _forget_life(self) -> None:
        super()._forget_life()
        self._loaded.clear()

    async def _release(self) -> None:
        if self._going.is_set():
            await self._post("/reset_prefix_cache")
        elif self._options.sleeps:
            await self._post("/sleep?level=1&mode=keep")
            self._asleep = True
        else:
            await self._post("/pause?mode=keep&clear_cache=true")

    async def _wake(self) -> None:
        if not self._asleep:
            return
        await self._post("/wake_up")
        self._asleep = False
        # waking up resumes, and the caller has not
        await self._hold()

    # ---- weights --------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int) -> None:
        if not self._adapters:
            self._check_unpinned()
        await self._ready_for_update(version)
        if self._options.recompute:
            await self._post("/pause?mode=keep&clear_cache=true")
        if not self._transfers:
            return
        try:
            await self._post("/start_weight_update")
        except ServerRefusedError:  # an attempt that was given up is still under way
            with suppress(ServerRefusedError):
                await self._post("/finish_weight_update")
            await self._post("/start_weight_update")

    async def end_update(self, version: int) -> None:
        self._check_usable()
        if self._transfers:
            await self._post("/finish_weight_update")
        if self._adapters:
            self._loaded.add(version)
        await self._post("/update_weight_version", {"new_version": str(version)})
        self._has_version((await self._client.get("/weight_info"))["weight_version"])
        self._unload_unused()

    @property
    def _transfers(self) -> bool:
        """Whether weights come through vLLM's interface for weight transfer."""
        return self._options.transport not in ("disk", "adapter")

    def _unload_unused(self) -> None:
        """Adapters that no request uses any more make room."""
        unused = self._loaded - {self._version, self._pinned, *self._in_flight.values()}
        self._loaded -= unused
        for version in unused:
            task = asyncio.create_task(self._unload(version))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, version: int) -> None:
        with suppress(ServerLostError, ServerRefusedError):  # a server that was started again does not have it
            await self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})

    async def unpin(self) -> None:
        while self._adapters and self._pinned in self._in_flight.values():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await super().unpin()
        self._unload_unused()
