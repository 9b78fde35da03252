"""A server that answers as SGLang's does: pauses that abort, versions, updates from disk, memory, and errors.

Its model and its clockwork are those of the scripted vLLM.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from scripted_vllm import Refused, ScriptedVllm, _Asked, row_table

_KNOWN = (
    "/generate /pause_generation /continue_generation /update_weight_version /model_info /flush_cache "
    "/update_weights_from_disk /init_weights_update_group /update_weights_from_distributed "
    "/release_memory_occupation /resume_memory_occupation"
)


class ScriptedSglang(ScriptedVllm):
    """`fault` breaks it in one way."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._going_on = asyncio.Event()
        self._going_on.set()
        self._holds_memory = True
        self.server_version = "0.5.9"
        self.info: dict[str, Any] = {"enable_metrics": True, "enable_memory_saver": True, "tp_size": 1}

    # ---- sampling ---------------------------------------------------------------------------------------------------

    async def _on_generate(self, body: Any, query: Any) -> Any:
        params = dict(body["sampling_params"])
        if len(body["input_ids"]) + params.get("max_new_tokens", 128) > self.length:
            raise Refused(400, "The input is longer than the model's context length.")
        await self._going_on.wait()  # a paused server takes no requests
        if not self._holds_memory:
            raise Refused(500, "weights are not in memory")
        params["max_tokens"] = params.pop("max_new_tokens", 128)
        params["top_k"] = max(0, params.get("top_k", -1))
        params["seed"] = params.pop("sampling_seed", 0) or 0
        self._numbers += 1
        asked = _Asked({"token_ids": body["input_ids"], "sampling_params": params, "priority": body.get("priority", 0)},
                       self._numbers, asyncio.get_running_loop().create_future(), "policy")  # fmt: skip
        self._waiting.append(asked)
        self._wake.set()
        try:
            return self._in_words(asked, body, (await asked.result)["choices"][0])
        finally:
            self._end(asked, "abort")

    def _draw(self, asked: _Asked) -> float:
        """It depends on the position in the whole sequence: what was given up continues as it would have."""
        return np.random.default_rng([asked.body["sampling_params"]["seed"], len(asked.row)]).random()

    def _in_words(self, asked: _Asked, body: Any, choice: Any) -> Any:
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        about: dict[str, Any] = {
            "id": str(asked.number),
            "finish_reason": {"type": choice["finish_reason"]},
            "weight_version": self._version,  # of now, whatever sampled the tokens
            "completion_tokens": len(asked.ids),
        }
        if body.get("return_logprob"):
            plain = [one if one is not None else 0.0 for one in self._plain(asked, logprobs)]
            about["output_token_logprobs"] = [[p, t, None] for p, t in zip(plain, asked.ids, strict=True)]
            if body.get("logprob_start_len") == 0:
                row = body["input_ids"]
                table = row_table(self.decoding, row)
                scored = [None, *(float(table[i, token]) for i, token in enumerate(row[1:]))]
                about["input_token_logprobs"] = [[p, t, None] for p, t in zip(scored, row, strict=True)]
        if body.get("return_routed_experts"):
            read = len(asked.row) - 1
            experts = np.arange(read, dtype="<i4")[:, None] % 8 + 10 * int(self._version) + np.zeros(4, "<i4")
            about["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
        if body.get("return_sampling_mask"):
            about["output_token_sampling_logprobs"] = logprobs
        return {"text": "", "output_ids": list(asked.ids), "meta_info": about}

    def _plain(self, asked: _Asked, cut: list[float]) -> list[float]:
        """Of the distribution at the temperature, before top_p and top_k cut it."""
        params = asked.body["sampling_params"]
        if params["temperature"] == 0 or (params.get("top_p", 1.0) == 1.0 and not params["top_k"]):
            return cut
        return [value - 0.25 for value in cut]  # something else than what was sampled from

    # ---- pauses -----------------------------------------------------------------------------------------------------

    async def _on_pause_generation(self, body: Any, query: Any) -> Any:
        assert body["mode"] == "abort"
        self._going_on.clear()
        self._on_abort_requests(None, None)
        return {"status": "ok"}

    def _on_continue_generation(self, body: Any, query: Any) -> Any:
        self._going_on.set()
        return {"status": "ok"}

    def _on_abort_request(self, body: Any, query: Any) -> Any:
        assert body["abort_all"]
        return self._on_abort_requests(None, None)

    def _on_flush_cache(self, body: Any, query: Any) -> Any:
        if self._running or self._waiting:
            raise Refused(400, "Flush cache failed.")
        return "Cache flushed."

    def _on_release_memory_occupation(self, body: Any, query: Any) -> Any:
        if self._running or self._waiting:
            raise Refused(400, "there are requests")
        self._holds_memory = False
        return None

    def _on_resume_memory_occupation(self, body: Any, query: Any) -> Any:
        self._holds_memory = True
        return None

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def _on_update_weights_from_disk(self, body: Any, query: Any) -> Any:
        if self.fault == "dies":
            await self.die()
            await asyncio.sleep(60)
        if self.fault == "refuses":
            raise Refused(400, '{"success": false, "message": "no such folder"}')
        if not self._holds_memory or self._running:
            raise Refused(400, "an update needs memory and no requests")
        found: dict[str, np.ndarray] = {}
        for path in await asyncio.to_thread(lambda: sorted(Path(body["model_path"]).glob("*.safetensors"))):
            found |= {name: value.astype(np.float64) for name, value in load_file(path).items()}
        kept = {"nothing": (*self.weights,), "stale_head": ("head",)}.get(self.fault, ())
        self.decoding = {**self.decoding, **{n: w for n, w in found.items() if n not in kept}}
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _on_update_weight_version(self, body: Any, query: Any) -> Any:
        assert body["abort_all_requests"] is False
        return super()._on_update_weight_version(body, query)

    def _on_model_info(self, body: Any, query: Any) -> Any:
        return {"weight_version": self._version, "served_model_name": "policy"}

    def _on_server_info(self, body: Any, query: Any) -> Any:
        return {"version": self.server_version, "context_length": self.length, **self.info}

    def _on_openapi_json(self, body: Any, query: Any) -> Any:
        return {"paths": {path: {} for path in {*_KNOWN.split()} - self.routes_missing}}

    def _on_metrics(self, body: Any, query: Any) -> Any:
        return f'sglang:generation_tokens_total{{model_name="policy"}} {float(self._tokens)}\n'
