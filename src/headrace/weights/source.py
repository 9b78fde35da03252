"""The weights of a torch model as a source."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from torch import Tensor

from headrace.weights.digest import fingerprint

OnLearner = Callable[[Callable[[], Any]], Awaitable[Any]]


class ModelWeights:
    """The trained tensors of a transformers model. `on_learner` runs a function on the learner's thread."""

    def __init__(self, hf_model: Any, on_learner: OnLearner = asyncio.to_thread) -> None:
        self._hf_model = hf_model
        self.on_learner = on_learner

    def tensors(self) -> dict[str, Tensor]:
        """Full tensors under their Hugging Face names, always in the same order; with adapters, only the adapters."""
        return {name: p.detach() for name, p in self._hf_model.named_parameters() if p.requires_grad}

    async def fingerprint(self) -> str:
        return await asyncio.to_thread(lambda: fingerprint(self.tensors().values()))
