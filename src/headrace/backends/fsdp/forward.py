"""The forward pass of a rank: a transformers model's own, whose modules may be sharded. It learns and scores only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.models.packed import PackedRows
from headrace.models.packed_forward import PackedForward
from headrace.models.parts import Parts
from headrace.models.routing import RoutingReplay


class RankForward:
    """What a learner needs of a model, without what an engine needs: a copy for sampling would hold full weights.

    Built before the model is sharded.
    """

    def __init__(self, hf_model: Any, attention: str = "auto") -> None:
        self._parts = Parts(hf_model)
        self.vocabulary: int = self._parts.config.vocab_size
        self.max_length = self._parts.max_length
        self.device: torch.device = self._parts.device
        training = hf_model.training
        hf_model.eval()
        self._forward = PackedForward(self._parts, attention)
        assert self._parts.split_head is not None  # asked in evaluation mode, and then known
        hf_model.train(training)
        self.attention = self._forward.kernel
        self.shares_prefixes = self.attention != "padded"
        self.row_block = 0

    def hidden(self, rows: PackedRows) -> Tensor:
        return self._forward.hidden(rows)

    def replay_routing(self) -> RoutingReplay:
        self.shares_prefixes = False  # rows with a shared prefix may be routed differently
        return self._forward.replay_routing()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._parts.logits(hidden_ND)

    def fused_head(self) -> None:
        return None
