"""What a rank's process or actor runs: it meets the others, then builds its learner."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from headrace.backends.fsdp.learner import RankLearner
from headrace.backends.local.host import eos_token_ids
from headrace.config import RunConfig

Address = tuple[str, int]


class FsdpRank:
    """One of N. All methods but its own are its learner's."""

    def __init__(self, config: RunConfig, timeout_s: float, rank: int, size: int) -> None:
        self._config, self._timeout_s = config, timeout_s
        self._rank, self._size = rank, size
        self._store: Any = None
        self._learner: RankLearner | None = None

    def listen(self, host: str) -> Address:
        """On rank 0: open the place where all meet."""
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, address: Address | None) -> None:
        """Meet the others, and build the learner."""
        if address is not None:
            # longer than the controller's patience, which sees more: it has the ranks' stacks
            limit = datetime.timedelta(seconds=2 * self._timeout_s + 60)
            store = self._store or dist.TCPStore(*address, is_master=False, timeout=limit)
            kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(kind, store=store, rank=self._rank, world_size=self._size, timeout=limit)
        self._learner = RankLearner(self._config, self._rank, self._size)

    def leave(self) -> None:
        """Forget the others, as a rank that lives on in its process must."""
        self._learner = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def facts(self) -> dict[str, Any]:
        """What the controller must know of the model."""
        learner = self.learner
        return {
            "max_length": learner.model.max_length,
            "vocabulary": learner.model.vocabulary,
            "eos_ids": tuple(eos_token_ids(learner.hf_model, learner.tokenizer)),
            "dtype": str(learner.forward_dtype).removeprefix("torch."),
            "infos": learner.gathered().infos(),
        }

    @property
    def learner(self) -> RankLearner:
        assert self._learner is not None, "join comes first"
        return self._learner

    def __getattr__(self, method: str) -> Any:
        return getattr(self.learner, method)
