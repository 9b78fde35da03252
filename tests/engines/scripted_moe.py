"""A scripted vLLM whose model is a tiny Qwen3-MoE that samples with other experts than its routers would choose.

So does a real server now and then, where two experts are nearly as good; here it happens with every token.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scripted_vllm import ScriptedVllm
from torch import Tensor
from transformers import AutoModelForCausalLM

EXPERTS, TOP_K, LAYERS = 4, 2, 2


def odd_experts(row: Any) -> np.ndarray:
    """[T, L, K]: what the server chooses for each token, whatever the weights say."""
    return np.array([[np.random.default_rng([token, at, layer]).permutation(EXPERTS)[:TOP_K] for layer in range(LAYERS)]
                     for at, token in enumerate(row)], np.uint8)  # fmt: skip


class ScriptedMoe(ScriptedVllm):
    """`returns` says whether it was started with --enable-return-routed-experts."""

    def __init__(self, folder: Path, returns: bool = True) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._experts: Tensor | None = None
        self.returns = returns
        self.said: list[tuple[list[int], np.ndarray]] = []
        for layer, decoder in enumerate(self._model.model.layers):
            decoder.mlp.gate.forward = self._gate(decoder.mlp.gate, layer)
        weights = {name: p.detach().double().numpy().copy() for name, p in self._model.named_parameters()}
        super().__init__(weights, length=256)

    def _gate(self, gate: Any, layer: int) -> Any:
        def forward(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(states, gate.weight)
            scores = logits.softmax(-1)
            chosen = scores.topk(TOP_K).indices if self._experts is None else self._experts[:, layer]
            weights = scores.gather(1, chosen)
            return logits, weights / (weights.sum(-1, keepdim=True) if gate.norm_topk_prob else 1.0), chosen

        return forward

    @torch.no_grad()
    def table(self, row: list[int], odd: bool) -> np.ndarray:
        """[T, V]: log-probabilities after each token, with odd experts, or with those of the routers."""
        self._experts = torch.from_numpy(odd_experts(row).astype(np.int64)) if odd else None
        logits = self._model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        return logits.log_softmax(-1).double().numpy()

    def _step(self, asked: Any) -> None:
        table = self.table(asked.row, odd=True)[-1]
        params = asked.body["sampling_params"]
        token = int(min(np.searchsorted(np.exp(table).cumsum(), self._draw(asked)), len(table) - 1))
        if params.get("top_k") == 1:  # asked at the beginning: what is returned is under the cut distribution
            token, table = int(table.argmax()), np.zeros_like(table)
        asked.ids.append(token)
        asked.logprobs.append(float(table[token]))
        asked.versions.append(self._version)
        self._tokens += 1
        stop = token in params.get("stop_token_ids", ())
        if stop or len(asked.ids) >= params["max_tokens"]:
            self._end(asked, "stop" if stop else "length")

    def _answer(self, asked: Any, reason: str) -> dict[str, Any]:
        scored = asked.body["sampling_params"].pop("prompt_logprobs", None) is not None
        answer = super()._answer(asked, reason)
        if scored:
            row = asked.body["token_ids"]
            table = self.table(row, odd=False)
            answer["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": float(table[i, t])}} for i, t in enumerate(row[1:])),
            ]
        elif self.returns:
            experts, file = odd_experts(asked.row[:-1]), io.BytesIO()
            np.save(file, experts)
            answer["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
            self.said.append((asked.row, experts))
        return answer

    def _on_finish_weight_update(self, body: Any, query: Any) -> Any:
        super()._on_finish_weight_update(body, query)
        state = {name: torch.from_numpy(value).float() for name, value in self.decoding.items()}
        self._model.load_state_dict(state, strict=True)
        return {}


class InAThread:
    """A scripted server with an event loop of its own, for runs that have another."""

    def __init__(self, server: ScriptedVllm) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(server.start())

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self.call(self.server.die())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
