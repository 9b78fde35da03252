"""A model in training: its adapters, the gradient accumulated so far, and its optimizer. Used from one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tinker.types import AdamParams
from torch import Tensor

from headrace.backends.local.optim import new_adamw, step
from headrace.backends.local.storage import State, collect_state, load_tensors
from headrace.config import OptimizerSection
from headrace.data.packing import cut_by_tokens
from headrace.models.causal import CausalModel
from headrace.models.logprobs import all_target_logprobs
from headrace.models.packed import PackedRows
from headrace.tinker_server.base import Adapted
from headrace.tinker_server.losses import Row, loss_of
from headrace.tinker_server.options import Refusal

_CHUNK = 1024  # positions whose logits are in memory at once


class TrainedModel:
    """Gradients accumulate over `forward_backward` until `optim_step` applies and clears them."""

    def __init__(self, adapted: Adapted, micro_batch_tokens: int) -> None:
        self.adapted = adapted
        self._budget = micro_batch_tokens
        self._parameters = adapted.parameters()
        self._optimizer = new_adamw(list(self._parameters.values()), OptimizerSection())

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
        """AdamW with the gradient accumulated so far."""
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
            group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        return {"grad_norm": step(self._optimizer, 1.0, params.grad_clip_norm)}

    def state(self) -> State:
        """The adapters ("weights") and Adam's moments ("optimizer"): the tensors themselves, which training changes."""
        return collect_state(self.adapted.hf_model, self._optimizer)

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor] | None) -> None:
        """Resume from a saved state; without moments, Adam starts from scratch. Accumulated gradients are cleared."""
        load_tensors("the saved state", self.adapted.hf_model, self._optimizer, weights, moments or {})
        self._set_gradients([None] * len(self._parameters))

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
    parts = all_target_logprobs(model, hidden_MD, targets_MK, _CHUNK).split([len(row.tokens) for row in rows])
    return [part[:, : row.targets_NK.shape[1]] for part, row in zip(parts, rows, strict=True)]
