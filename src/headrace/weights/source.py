"""The weights of a torch model as a source."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from headrace.weights.base import TensorInfo
from headrace.weights.digest import weight_digest

OnLearner = Callable[[Callable[[], Any]], Awaitable[Any]]


class ModelWeights:
    """The trained tensors of a transformers model. `on_learner` runs a function on the learner's thread."""

    def __init__(self, hf_model: Any, on_learner: OnLearner = asyncio.to_thread) -> None:
        self._hf_model = hf_model
        self.on_learner = on_learner

    def tensors(self) -> dict[str, Tensor]:
        """Full tensors under their Hugging Face names, always in the same order; with adapters, only the adapters."""
        return {name: p.detach() for name, p in self._hf_model.named_parameters() if p.requires_grad}

    async def digest(self) -> str:
        return await asyncio.to_thread(lambda: weight_digest(self.tensors().values()))

    def adapter_config(self) -> dict[str, Any]:
        """What PEFT would write beside the adapters, as plain data."""
        peft = self._hf_model.peft_config["default"].to_dict()
        names = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "bias")
        found = {name: peft.get(name) for name in names}
        return {
            **found,
            "peft_type": "LORA",
            "target_modules": sorted(found["target_modules"]),
            "task_type": "CAUSAL_LM",
        }

    def stream(self) -> NamedTensors:
        """The same tensors as a stream, for transports to servers; read it on the learner's thread."""
        return NamedTensors(self.tensors())


class NamedTensors:
    """Tensors that are there in full, as a stream."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def infos(self) -> list[TensorInfo]:
        return [
            TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
            for name, tensor in self._tensors.items()
        ]

    def chunks(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        chunk: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._tensors.items():
            if chunk and size + tensor.nbytes > max_bytes:
                yield chunk
                chunk, size = [], 0
            chunk.append((name, tensor))
            size += tensor.nbytes
        if chunk:
            yield chunk
