"""The losses of the Tinker API: sums over tokens of one datum's log-probabilities.

Notation: π the policy now, μ what the tokens were sampled with, A the advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.algorithms.losses import LOG_RATIO_BOUND
from headrace.registry import nearest
from headrace.tinker_server.options import Refusal
from headrace.tinker_server.wire import Datum, TrainRequest

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    """A loss, the inputs that it needs and may have, and its settings with their defaults."""

    function: Callable[[Tensor, Inputs], Tensor]
    needs: frozenset[str]
    may_have: frozenset[str] = frozenset()
    settings: tuple[tuple[str, float], ...] = ()


def _cross_entropy(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """-Σ w log π, over [N] or [N, K] targets."""
    return -(inputs["weights"] * logprobs).sum()


def _importance_sampling(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """-Σ (π/μ) A."""
    return -(_ratio(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """-Σ min(r A, clip(r, low, high) A) with r = π/μ."""
    return _clipped(_ratio(logprobs - inputs["logprobs"]), inputs)


def _cispo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """-Σ sg(clip(r, low, high)) A log π with r = π/μ."""
    weight = _clamp(_ratio(logprobs.detach() - inputs["logprobs"]), inputs)
    return -(weight * inputs["advantages"] * logprobs).sum()


def _gspo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """As ppo, with exp(mean of log(π/μ) over the marked tokens) as every token's ratio, and its own gradient."""
    marked = inputs["sequence_ratio_mask"] != 0
    if not bool(marked.any()):
        return logprobs.sum() * 0
    mean = (logprobs.detach() - inputs["logprobs"])[marked].mean()
    return _clipped(_ratio(mean + logprobs - logprobs.detach()), inputs)


def _dro(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """-Σ [A log π - (β/2) (log π - log μ)²]."""
    apart = (logprobs - inputs["logprobs"]).square()
    return -(inputs["advantages"] * logprobs - 0.5 * inputs["beta"] * apart).sum()


def _clipped(ratio: Tensor, inputs: Inputs) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clamp(ratio, inputs) * advantages).sum()


def _clamp(ratio: Tensor, inputs: Inputs) -> Tensor:
    return torch.minimum(torch.maximum(ratio, inputs["clip_low_threshold"]), inputs["clip_high_threshold"])


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(max=LOG_RATIO_BOUND))


_SAMPLED = frozenset({"target_tokens", "logprobs", "advantages"})
_CLIPS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_USUAL_CLIPS = (("clip_low_threshold", 0.8), ("clip_high_threshold", 1.2))
LOSSES: dict[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(_cross_entropy, frozenset({"target_tokens"}), frozenset({"weights"})),
    "importance_sampling": TinkerLoss(_importance_sampling, _SAMPLED),
    "ppo": TinkerLoss(_ppo, _SAMPLED, _CLIPS, _USUAL_CLIPS),
    "cispo": TinkerLoss(_cispo, _SAMPLED, _CLIPS, (("clip_low_threshold", 0.0), ("clip_high_threshold", 4.0))),
    "gspo": TinkerLoss(_gspo, _SAMPLED | {"sequence_ratio_mask"}, _CLIPS, _USUAL_CLIPS),
    "dro": TinkerLoss(_dro, _SAMPLED, frozenset(), (("beta", 0.05),)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A checked datum: targets are [N, K], with K = 1 and `flat` where the client gave [N]."""

    tokens: tuple[int, ...]
    targets_NK: np.ndarray
    flat: bool
    inputs: Mapping[str, np.ndarray]


def find_loss(name: str) -> TinkerLoss:
    """A loss by its name in the API."""
    if name not in LOSSES:
        raise Refusal(f'unknown loss "{name}"{nearest(name, LOSSES)}; this server has {", ".join(LOSSES)}')
    return LOSSES[name]


def check_rows(request: TrainRequest, vocabulary: int, max_length: int) -> tuple[Row, ...]:
    """The rows of a request; a bad one is refused before anything is computed."""
    loss = find_loss(request.loss)
    settings = _settings(request, loss)
    return tuple(
        _check_row(datum, f"datum {index}", request.loss, settings, vocabulary, max_length)
        for index, datum in enumerate(request.data)
    )


def _settings(request: TrainRequest, loss: TinkerLoss) -> dict[str, float]:
    found = dict(loss.settings)
    for name, value in request.config.items():
        if name not in found:
            known = ", ".join(found) or "none"
            raise Refusal(f'loss "{request.loss}" has no setting "{name}"; its settings: {known}')
        if isinstance(value, str) or not np.isfinite(value):
            raise Refusal(f"loss_fn_config: {name} must be a finite number, got {value!r}")
        found[name] = float(value)
    return found


def _check_row(
    datum: Datum, where: str, name: str, settings: Mapping[str, float], vocabulary: int, max_length: int
) -> Row:
    loss, length = LOSSES[name], len(datum.tokens)
    if length > max_length:
        raise Refusal(f"{where} has {length} tokens, and the model reads at most {max_length}; shorten it")
    _check_ids(np.asarray(datum.tokens), f"{where}: model_input", vocabulary)
    missing, odd = loss.needs - datum.inputs.keys(), datum.inputs.keys() - loss.needs - loss.may_have
    if missing or odd:
        problem = f"lacks {', '.join(sorted(missing))}" if missing else f"has {', '.join(sorted(odd))}"
        wanted = ", ".join([*sorted(loss.needs), *(f"{extra} (optional)" for extra in sorted(loss.may_have))])
        raise Refusal(f'{where} {problem}; loss "{name}" takes the inputs {wanted}')
    targets = datum.inputs["target_tokens"]
    if targets.dtype.kind != "i":
        raise Refusal(f"{where}: target_tokens must be integers, got {targets.dtype}")
    if targets.ndim not in ((1, 2) if name == "cross_entropy" else (1,)) or targets.shape[0] != length:
        raise Refusal(f"{where}: target_tokens has shape {list(targets.shape)}, and model_input has {length} tokens")
    _check_ids(targets, f"{where}: target_tokens", vocabulary)
    given = {key: _numbers(value, targets, f"{where}: {key}") for key, value in datum.inputs.items()}
    del given["target_tokens"]
    if name == "cross_entropy":
        given.setdefault("weights", np.ones(targets.shape, dtype=np.float32))
    for key, value in settings.items():
        given.setdefault(key, np.full(targets.shape, value, dtype=np.float32))
    return Row(datum.tokens, targets.reshape(length, -1).astype(np.int64), targets.ndim == 1, given)


def _check_ids(ids: np.ndarray, where: str, vocabulary: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        odd = ids[(ids < 0) | (ids >= vocabulary)].flat[0]
        raise Refusal(f"{where} has the token {odd}, and the model has 0 to {vocabulary - 1}; another tokenizer?")


def _numbers(value: np.ndarray, targets: np.ndarray, where: str) -> np.ndarray:
    if value.shape != targets.shape:
        raise Refusal(f"{where} has shape {list(value.shape)}, and target_tokens has {list(targets.shape)}")
    if not np.isfinite(value).all():
        raise Refusal(f"{where} has numbers that are not finite; mask those tokens with 0")
    return value


def loss_of(name: str, row: Row, logprobs_NK: Tensor) -> Tensor:
    """The loss of one row; a number with gradient."""
    logprobs = logprobs_NK.squeeze(1) if row.flat else logprobs_NK
    inputs: dict[str, Any] = {
        key: torch.from_numpy(np.array(value)).to(logprobs.dtype) for key, value in row.inputs.items()
    }
    return LOSSES[name].function(logprobs, inputs)
