"""The policy of an engine contract that is a tiny transformers model in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import tiny
from contracts.engine_contract import EngineContract
from headrace.weights.digest import weight_digest


class HfPolicyContract(EngineContract):
    """Subclasses set `hf_model` before each test."""

    vocabulary = tiny.VOCABULARY
    hf_model: Any

    @torch.no_grad()
    def reference_logprobs(self, ids: Sequence[int]) -> np.ndarray:
        logits = self.hf_model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    def detokenize(self, ids: Sequence[int]) -> str:
        return tiny.detokenize(ids)

    def change_weights(self) -> None:
        tiny.randomise(self.hf_model, seed=99)

    def digest(self) -> str:
        return weight_digest(self.hf_model.parameters())
