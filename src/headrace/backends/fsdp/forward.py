"""The forward pass of a rank: a transformers model's own, whose modules may be sharded. It learns and scores only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.models.fallback import _padded_index, _Parts
from headrace.models.packed import PackedRows


class RankForward:
    """What a learner needs of a model, without what an engine needs: a copy for sampling would hold full weights.

    Built before the model is sharded.
    """

    def __init__(self, hf_model: Any) -> None:
        config = hf_model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.shares_prefixes = False
        self.row_block = 0
        self._parts = _Parts(hf_model)
        training = hf_model.training
        hf_model.eval()
        self._split_head = self._parts.head_alone_gives_logits()
        hf_model.train(training)

    def hidden(self, rows: PackedRows) -> Tensor:
        count, longest, index_N = _padded_index(rows)
        if index_N is None:
            return self._run(rows.ids_N.view(count, longest)).flatten(0, 1)
        ids = rows.ids_N.new_zeros(count * longest).index_copy(0, index_N, rows.ids_N)
        mask = torch.zeros_like(ids).index_fill(0, index_N, 1)
        padded = self._run(ids.view(count, longest), attention_mask=mask.view(count, longest))
        return padded.flatten(0, 1).index_select(0, index_N)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._parts.head(hidden_ND) if self._split_head else hidden_ND

    def fused_head(self) -> None:
        return None

    def _run(self, ids_RL: Tensor, **arguments: Any) -> Tensor:
        if self._split_head:
            return self._parts.decoder(input_ids=ids_RL, use_cache=False, **arguments).last_hidden_state
        return self._parts.whole(input_ids=ids_RL, use_cache=False, **arguments).logits
