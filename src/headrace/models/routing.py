"""Routing replay: a mixture-of-experts model reads tokens with the experts that the sampler chose.

Only the choice is replayed. What each expert's answer is weighed with comes from the model's own router, so its
gradient is as always.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.data.routing import RoutedExperts
from headrace.errors import ConfigError, DataError
from headrace.models.parts import Parts

OWN = -1
"""Stands for an expert that the model's own router is to choose."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOP = (torch.topk, torch.Tensor.topk)


class RoutingReplay:
    """Attached to the routers of a model, for good. `now` is what the tokens of the pass under way are routed to,
    [tokens, slots]; it stays until the next pass, because recomputed activations ask for it again. None: as usual."""

    def __init__(self, parts: Parts) -> None:
        found = list(_routers(parts.whole))
        if not found:
            raise no_routers()
        self.now: Tensor | None = None
        self.layers: int = parts.config.num_hidden_layers
        self.top_k: int = found[0][1].top_k
        self.experts: int = found[0][1].num_experts
        for layer, router in found:
            _require_one_choice(router, parts)
            router.forward = self._replayed(router.forward, layer)

    def packed(self, routed: Sequence[RoutedExperts | None], lengths: Sequence[int]) -> np.ndarray | None:
        """What the tokens of rows are routed to, end to end: [tokens, slots]. Rows without it choose by themselves."""
        if all(one is None for one in routed):
            return None
        slots = self.layers * self.top_k
        for one in routed:
            if one is not None and (one.slots != slots or one.array().max() >= self.experts):
                raise DataError(
                    f"a token was sampled with {one.slots} experts up to number {one.array().max()}, and the learner's "
                    f"model has {self.layers} layers with {self.top_k} of {self.experts} each: is it another model?"
                )
        own = (np.full((length, slots), OWN) for length in lengths)
        return np.concatenate(
            [free if one is None else one.array().astype(np.int64) for one, free in zip(routed, own, strict=True)]
        )

    def _replayed(self, usual: Callable[..., Any], layer: int) -> Callable[..., Any]:
        span = slice(layer * self.top_k, (layer + 1) * self.top_k)

        def forward(*given: Any, **named: Any) -> Any:
            if self.now is None:
                return usual(*given, **named)
            with _Choice(self.now[:, span], self.experts):
                return usual(*given, **named)

        return forward


def no_routers() -> ConfigError:
    """For models without experts."""
    return ConfigError(
        "backend.routing_replay = true needs a mixture-of-experts model, and this one has no routers; set it to false"
    )


class _Choice(TorchFunctionMode):
    """Within it, choosing the best of all experts gives those that were chosen before, with their own scores."""

    def __init__(self, chosen_NK: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen_NK, self._experts = chosen_NK, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP or args[0].shape[-1] != self._experts or found.indices.shape != self._chosen_NK.shape:
            return found
        chosen_NK = torch.where(self._chosen_NK == OWN, found.indices, self._chosen_NK)
        return torch.return_types.topk((args[0].gather(-1, chosen_NK), chosen_NK))


def _routers(model: nn.Module) -> list[tuple[int, Any]]:
    """(layer, module), in order. transformers' routers return which experts they chose, and with which weights."""
    found: list[tuple[int, Any]] = []
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if layer and type(module).__name__.lower().endswith("topkrouter") and hasattr(module, "num_experts"):
            found.append((int(layer[1]), module))
    return found


@torch.no_grad()
def _require_one_choice(router: Any, parts: Parts) -> None:
    """Routers choose in many ways: see whether this one's choice is the one that is replayed."""
    states = torch.linspace(-1, 1, 3 * parts.config.hidden_size, device=parts.device, dtype=parts.dtype).view(3, -1)
    first_N1 = torch.arange(3, device=parts.device)[:, None]
    chosen_NK = (first_N1 + torch.arange(router.top_k, device=parts.device)) % router.num_experts
    try:
        with _Choice(chosen_NK, router.num_experts):
            answers = router.forward(states)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        answers = (str(error),)
    found = [one for one in answers if isinstance(one, Tensor) and one.dtype == torch.long]
    if len(found) != 1 or not torch.equal(found[0], chosen_NK):
        raise ConfigError(
            f"backend.routing_replay = true cannot replay the choices of {type(router).__name__}; set it to false"
        )
