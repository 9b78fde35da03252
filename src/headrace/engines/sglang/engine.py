"""SglangEngine: one SGLang server behind the engine protocol.

SGLang says of a reply only which version the server had when the reply ended. So a pause has the server give up what it
decodes, with the tokens so far; when it continues, the rest of each reply is asked for, with those tokens as part of
the prompt. Every leg has one version, and the cache is that of the weights that decode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from headrace.engines.base import Generation
from headrace.engines.request import Request
from headrace.engines.servers.client import ServerRefusedError
from headrace.engines.servers.engine import ServerEngine
from headrace.engines.servers.facts import require_length
from headrace.engines.servers.life import LONGEST_REPLY_S
from headrace.engines.sglang.checks import inspect_server
from headrace.engines.sglang.messages import generate_body, row_logprobs, score_body, take_answer
from headrace.errors import ServerLostError

_MEMORY = {"tags": ["kv_cache", "weights"]}


class SglangEngine(ServerEngine):
    """Made on any thread; from its first call on it belongs to the event loop of that call."""

    kind = "sglang"
    tokens_pattern = re.compile(r"^sglang:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
    _world = 1

    # ---- sampling -------------------------------------------------------------------------------------------------

    async def _generation(self, request: Request, pinned: bool) -> Generation:
        """Ask for one leg after the other, until a server that still counts has ended the reply."""
        first = self._life()
        while True:
            await self._opened()
            await self._up.wait()
            await self._going.wait()
            life = self._life()
            if life != first:  # nobody vouches for what an earlier life has sampled
                first = life
                request.start_over()
            try:
                routed = self._options.routed_experts
                body = generate_body(request, -1 if pinned else 0, routed)
                answer = await self._client.post("/generate", body, LONGEST_REPLY_S)
                if life != self._life():
                    self._reissued += 1
                    continue
                had = len(request.ids)
                reason = take_answer(request, answer, self.server.url, routed)
                self._count_answer(len(request.ids) - had)
            except (ServerLostError, ServerRefusedError) as error:
                await self._asked_in_vain(life, error)
                continue
            if reason is None:
                continue  # the server was paused: the rest is asked for when it continues
            self.server.answered()
            await self._going.wait()  # nothing is delivered between a sync and its proof
            if life == self._life():
                return request.generation(reason)
            self._reissued += 1

    async def _score(self, row: Sequence[int]) -> list[float]:
        if len(row) < 2:
            return []
        return row_logprobs(row, await self._post("/generate", score_body(row)), self.server.url)

    async def _hold(self) -> None:
        await self._post("/pause_generation", {"mode": "abort"})

    async def _let_go(self) -> None:
        await self._post("/continue_generation", {})

    async def _abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def resume(self) -> None:
        try:
            await super().resume()
        except ServerLostError:
            if not self._options.waits:
                raise
            self._going.set()  # it is started again, and continues then

    # ---- the server -----------------------------------------------------------------------------------------------

    async def _revive(self) -> None:
        with suppress(ServerRefusedError):  # what it lacks is found out next
            await self._client.post("/continue_generation", {})

    async def _inspect(self) -> None:
        options = self._options
        facts = await inspect_server(self._client, options.transport, options.sleeps, options.routed_experts)
        require_length(facts.max_model_length, self.max_model_length, self.server.url, "--context-length")
        self._world = facts.world_size

    async def _name_version(self, version: int) -> None:
        # by default it would abort all requests
        await self._client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    @property
    def _world_size(self) -> int:
        return self._world

    async def _release(self) -> None:
        if self._options.sleeps and not self._going.is_set():
            await self._post("/release_memory_occupation", _MEMORY)
            self._asleep = True
        else:
            await self._post("/flush_cache")

    async def _wake(self) -> None:
        if self._asleep:
            await self._post("/resume_memory_occupation", _MEMORY)
            self._asleep = False

    # ---- weights --------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int) -> None:
        self._check_unpinned()
        await self._ready_for_update(version)

    async def end_update(self, version: int) -> None:
        self._check_usable()
        await self._post("/flush_cache")  # prefixes of the old weights
        await self._name_version(version)
        self._has_version((await self._client.get("/model_info"))["weight_version"])
