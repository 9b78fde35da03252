"""Models that are only asked, never trained: the reference and the teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.config import ModelSection
from headrace.data.routing import RoutedExperts
from headrace.errors import ConfigError
from headrace.models.causal import CausalModel, build_causal_model
from headrace.models.load import load_model, load_tokenizer
from headrace.models.logprobs import target_logprobs, wide_dtype
from headrace.models.packed import PackedRows
from headrace.models.routing import RoutingReplay
from headrace.models.transfer import download, upload


@torch.no_grad()
def score_rows(
    model: CausalModel,
    rows: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    micro_batches: Iterable[Sequence[int]],
    chunk: int,
    routed: Routed | None = None,
) -> list[list[float]]:
    """For each row, the log-probability of every token but the first, at the row's temperature.

    `routed` says which experts the tokens of the rows go to, and who sees to it.
    """
    found: list[list[float]] = [[] for _ in rows]
    for indices in micro_batches:
        chosen = [rows[i] for i in indices]
        counts = [len(row) - 1 for row in chosen]
        packed, (targets_T, heat_T) = PackedRows.from_rows([row[:-1] for row in chosen], model.shares_prefixes).to(
            model.device,
            np.array([token for row in chosen for token in row[1:]], dtype=np.int64),
            np.repeat(np.array([temperatures[i] for i in indices], dtype=np.float64), counts),
        )
        hidden_TD = model.hidden(with_routing(packed, routed, indices))[packed.where_T]
        heat_T = heat_T.to(wide_dtype(hidden_TD.dtype))
        (logprobs_T,) = download([target_logprobs(model, hidden_TD, targets_T, heat_T, chunk)[0]])
        for index, part in zip(indices, logprobs_T.split(counts), strict=True):
            found[index] = part.tolist()
    return found


Routed = tuple[RoutingReplay, Sequence[RoutedExperts | None]]


def with_routing(packed: PackedRows, routed: Routed | None, indices: Sequence[int]) -> PackedRows:
    """Packed rows, which are the ones with these indices, with the experts that their tokens go to."""
    if routed is None:
        return packed
    replay, by_row = routed
    experts = replay.packed([by_row[i] for i in indices], packed.lengths)
    return packed if experts is None else packed.routed_to(upload([experts], packed.ids_N.device)[0])


class FrozenModel:
    """A model of its own, with its tokenizer; `copy_from` refreshes it with the policy's weights."""

    def __init__(self, section: ModelSection) -> None:
        self.tokenizer = load_tokenizer(section.name)
        self.hf_model = load_model(section).eval().requires_grad_(False)
        self.model = build_causal_model(self.hf_model, section.fast_path, section.attention)
        self.refreshed = False

    def copy_from(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights of the policy: all, or those that are trained."""
        ours = dict(self.hf_model.named_parameters())
        if not weights.keys() <= ours.keys():
            raise ConfigError("a teacher of another architecture cannot be refreshed; set distill.refresh_every = 0")
        with torch.no_grad():
            for name, tensor in weights.items():
                ours[name].copy_(tensor)
        self.refreshed = True
