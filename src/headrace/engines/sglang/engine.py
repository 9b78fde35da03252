"""SglangEngine: one SGLang server behind the engine protocol.

SGLang says of a reply only which version the server had when the reply ended. So a pause has the server give up what it
decodes, with the tokens so far; when it continues, the rest of each reply is asked for, with those tokens as part of
the prompt. Every leg has one version, and the cache is that of the weights that decode. Life, loss and return of the
server are as with vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.engines.base import Generation
from headrace.engines.request import Request
from headrace.engines.servers.client import ServerRefusedError
from headrace.engines.sglang.checks import inspect_server
from headrace.engines.sglang.messages import generate_body, row_logprobs, score_body, take_answer
from headrace.engines.vllm.engine import VllmEngine
from headrace.errors import DataError, EngineError, ServerLostError
from headrace.weights.base import Endpoint

_TOKENS = re.compile(r"^sglang:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
_POLL_LIMIT_S = 30.0


class SglangEngine(VllmEngine):
    """Made on any thread; from its first call on it belongs to the event loop of that call."""

    _earlier = _answered = 0

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
                answer = await self._client.post("/generate", generate_body(request, -1 if pinned else 0))
                if life != self._life():
                    self._reissued += 1
                    continue
                had = len(request.ids)
                reason = take_answer(request, answer, self.server.url)
                self._answered += len(request.ids) - had
                self._tokens = max(self._tokens, self._answered)  # the server is asked only now and then
            except ServerLostError as error:
                await self._lost(life, error)
                continue
            except ServerRefusedError as error:
                if error.status < 500:
                    raise DataError(str(error)) from None
                if life == self._life() and await self._healthy():
                    raise EngineError(str(error)) from None
                await self._lost(life, error)
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

    async def resume(self) -> None:
        try:
            await super().resume()
        except ServerLostError:
            if not self._options.waits:
                raise
            self._going.set()  # it is started again, and continues then

    async def _count_tokens(self) -> int:
        return max(await self._counted() - self._earlier, self._answered)

    async def _counted(self) -> int:
        return int(sum(map(float, _TOKENS.findall(await self._client.get("/metrics", _POLL_LIMIT_S)))))

    async def _greet(self) -> None:
        self._facts = await inspect_server(self._client, self._options.transport, self._options.sleeps)
        await self._name_version(self._version)
        self._earlier, self._answered = await self._counted(), 0  # of others, and of the inspection

    async def _name_version(self, version: int) -> None:
        # by default it would abort all requests
        await self._client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # ---- weights --------------------------------------------------------------------------------------------------

    def endpoints(self) -> list[Endpoint]:
        (one,) = super().endpoints()
        return [Endpoint(one.url, "sglang", one.world_size, one.incarnation, one.headers)]

    async def begin_update(self, version: int) -> None:
        self._check_usable()
        await self._opened()
        await self._alive.wait()
        if self._pinned is not None:
            raise EngineError(
                f"version {self._pinned} is pinned, and one server has one version at a time; unpin first"
            )
        if self._going.is_set():
            raise EngineError(f"version {version} changes the weights of a server that decodes; pause the engine first")
        await self._wake()

    async def end_update(self, version: int) -> None:
        self._check_usable()
        await self._post("/flush_cache")  # prefixes of the old weights
        await self._name_version(version)
        self._version = int((await self._client.get("/model_info"))["weight_version"])
        self._synced = True
        self._up.set()

    async def release_cache(self) -> None:
        """Memory goes back while the learner works; weights come back with `resume`, or with the next sync."""
        self._check_usable()
        await self._opened()
        if self._in_flight and self._going.is_set():
            raise EngineError(
                f"{len(self._in_flight)} sequences are being decoded; pause the engine before releasing its cache"
            )
        if self._options.sleeps and not self._going.is_set():
            await self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self._asleep = True
        else:
            await self._post("/flush_cache")

    async def _wake(self) -> None:
        if self._asleep:
            await self._post("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self._asleep = False

    async def restart(self) -> None:
        """Have the server give up all requests; they are asked again."""
        self._check_usable()
        await self._opened()
        await self._alive.wait()
        self._epoch += 1
        self._restarts += 1
        await self._post("/abort_request", {"abort_all": True})
