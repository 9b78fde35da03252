"""A model in training: its adapters, the gradient gathered so far, and its optimizer. Used from one thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tinker.types import AdamParams
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.data.packing import cut_by_tokens
from headrace.errors import BackendError, DivergedError
from headrace.models.causal import CausalModel
from headrace.models.logprobs import wide_dtype
from headrace.models.packed import PackedRows
from headrace.tinker_server.base import Adapted
from headrace.tinker_server.losses import Row, loss_of
from headrace.tinker_server.options import Refusal

_CHUNK = 1024  # positions whose logits are in memory at once
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
Tensors = dict[str, Tensor]


class TrainedModel:
    """Gradients add up over `forward_backward` until `optim_step` applies and forgets them."""

    def __init__(self, adapted: Adapted, micro_batch_tokens: int) -> None:
        self.adapted = adapted
        self._budget = micro_batch_tokens
        self._parameters = adapted.parameters()
        self._optimizer = torch.optim.AdamW(list(self._parameters.values()), fused=True)

    def forward_backward(
        self, loss: str, rows: Sequence[Row], forward_only: bool = False
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """(log-probabilities of each row's targets, metrics). One that fails leaves the gradients as they were."""
        earlier = [parameter.grad for parameter in self._parameters.values()]
        self._set_gradients([None] * len(earlier))
        try:
            with torch.set_grad_enabled(not forward_only):
                found, total = self._run(loss, rows, forward_only)
        except BaseException:
            self._set_gradients(earlier)
            raise
        fresh = [parameter.grad for parameter in self._parameters.values()]
        both = zip(earlier, fresh, strict=True)
        self._set_gradients([old if new is None else new if old is None else old.add_(new) for old, new in both])
        return found, {"loss:sum": total}

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """AdamW with the gradient gathered so far."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise BackendError("optim_step was called with no gradient; call forward_backward before it")
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            self._set_gradients([None] * len(self._parameters))
            raise DivergedError(f"the gradient norm is {norm}, and no step was made; lower the learning rate")
        if 0 < params.grad_clip_norm < norm:
            torch._foreach_mul_(gradients, params.grad_clip_norm / norm)
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
            group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        self._optimizer.step()
        self._set_gradients([None] * len(self._parameters))
        return {"grad_norm": norm}

    def weights(self) -> Tensors:
        """A copy of the adapters."""
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def moments(self) -> Tensors:
        """A copy of the optimizer's state."""
        return {
            f"{name}/{key}": self._optimizer.state[p][key].detach().clone()
            for name, p in self._parameters.items()
            for key in _MOMENTS
            if p in self._optimizer.state
        }

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor] | None) -> None:
        """Go on from a saved state; without moments, the optimizer begins anew. Gathered gradients are forgotten."""
        self.adapted.load(weights)
        self._set_gradients([None] * len(self._parameters))
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if moments is not None and f"{name}/step" in moments:
                self._optimizer.state[parameter] = {key: moments[f"{name}/{key}"].clone() for key in _MOMENTS}

    def _run(self, loss: str, rows: Sequence[Row], forward_only: bool) -> tuple[list[np.ndarray], float]:
        found: list[np.ndarray] = [np.empty(0)] * len(rows)
        total = 0.0
        for indices in cut_by_tokens([row.tokens for row in rows], self._budget):
            chosen = [rows[i] for i in indices]
            parts = _logprobs(self.adapted.model, chosen)
            losses = torch.stack([loss_of(loss, row, part) for row, part in zip(chosen, parts, strict=True)])
            if not bool(torch.isfinite(losses).all()):
                bad = indices[int((~torch.isfinite(losses)).nonzero()[0])]
                raise Refusal(f"the loss of datum {bad} is not finite; check its logprobs and advantages")
            if not forward_only:
                losses.sum().backward()
            total += float(losses.detach().double().sum())
            for index, row, part in zip(indices, chosen, parts, strict=True):
                array = part.detach().float().numpy()
                found[index] = array[:, 0] if row.flat else array
        return found, total

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient


def _logprobs(model: CausalModel, rows: Sequence[Row]) -> list[Tensor]:
    """Log-probabilities [N, K] of each row's targets, with gradient where it is enabled."""
    widest = max(row.targets_NK.shape[1] for row in rows)
    padded = [np.pad(row.targets_NK, ((0, 0), (0, widest - row.targets_NK.shape[1]))) for row in rows]
    targets_MK = torch.from_numpy(np.concatenate(padded))
    packed = PackedRows.from_rows([row.tokens for row in rows], model.shares_prefixes)
    hidden_MD = model.hidden(packed)[packed.where_T]

    def one_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.logits(hidden)
        return torch.log_softmax(logits.to(wide_dtype(logits.dtype)), dim=-1).gather(1, targets)

    again = torch.is_grad_enabled() and hidden_MD.shape[0] > _CHUNK
    chunks = []
    for hidden, targets in zip(hidden_MD.split(_CHUNK), targets_MK.split(_CHUNK), strict=True):
        # computed again in the backward pass, or memory would grow with vocabulary x length
        chunk = checkpoint(one_chunk, hidden, targets, use_reentrant=False) if again else one_chunk(hidden, targets)
        assert isinstance(chunk, Tensor)
        chunks.append(chunk)
    parts = torch.cat(chunks).split([len(row.tokens) for row in rows])
    return [part[:, : row.targets_NK.shape[1]] for part, row in zip(parts, rows, strict=True)]
