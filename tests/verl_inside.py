# pyright: reportMissingImports=false
"""What runs inside verl in tests: a rollout replica that serves the bundled model, and workflows as agent loops."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from headrace import Model, Task
from headrace.backends.local.backend import LocalBackend
from headrace.backends.setup import attach_engine, choose
from headrace.backends.verl.cpu import join_group, register_engine
from headrace.backends.verl.settings import worker_config
from headrace.config.loading import build_config
from headrace.engines.base import Generation, SamplingParams
from headrace.verl import as_agent_loop
from verl_pool import verl_sections

DOUBT = {"role": "user", "content": "Are you sure? Say it again."}


async def ask_twice(task: Task, model: Model) -> float:
    """Two turns; the reward differs from rollout to rollout."""
    first = await model.chat(task.messages)
    second = await model.chat([*task.messages, first.message, DOUBT])
    return float(len(second.completion_ids) % 5)


async def ask_once(task: Task, model: Model) -> None:
    await model.chat(task.messages)


AskTwice = as_agent_loop(ask_twice)


class PromptSeeded:
    """The bundled model's engine, whose random numbers depend on the prompt alone: who asks does not matter."""

    def __init__(self) -> None:
        config = build_config({"backend": {"threads": 1}})
        self.backend = LocalBackend(config)
        self.engine = attach_engine(config, self.backend, choose(config)).engine

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        digest = hashlib.sha256(repr(list(prompt_ids)).encode()).digest()
        return await self.engine.generate(prompt_ids, params, int.from_bytes(digest[:7], "big"))

    async def close(self) -> None:
        await self.engine.close()
        await self.backend.close()


class BundledServer:
    """A server behind verl's own client and load balancer."""

    def __init__(self) -> None:
        self._engine: PromptSeeded | None = None
        self._made: list[tuple[list[int], list[int], list[float]]] = []

    async def start(self) -> str:
        self._engine = PromptSeeded()
        return "bundled:0"

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:  # fmt: skip
        assert self._engine is not None and sampling_params["logprobs"] and not (image_data or video_data)
        carried = {name: sampling_params[name] for name in ("temperature", "top_p", "max_tokens")}
        params = SamplingParams(**carried, top_k=max(0, sampling_params["top_k"]), stop=())
        made = await self._engine.generate(prompt_ids, params, 0)
        self._made.append((list(prompt_ids), list(made.completion_ids), list(made.logprobs)))
        return TokenOutput(
            token_ids=list(made.completion_ids), log_probs=list(made.logprobs), stop_reason="completed",
            extra_fields={"global_steps": 3},
        )  # fmt: skip

    async def made(self) -> list[tuple[list[int], list[int], list[float]]]:
        return self._made


class BundledReplica(RolloutReplica):
    """What verl's server manager makes for `actor_rollout_ref.rollout.name=bundled`. It needs no GPU."""

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        remote: Any = ray.remote
        self._server_handle = remote(num_cpus=0, max_concurrency=64)(BundledServer).remote()
        self._server_address = await self._server_handle.start.remote()
        self.servers = [self._server_handle]


class Actor:
    """verl's training worker, and what its trainer does with it: old log-probabilities, then one update."""

    def __init__(self, port: int) -> None:
        torch.set_num_threads(1)
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        register_engine()
        join_group(timeout_s=120)
        self._worker = TrainingWorker(worker_config(build_config(verl_sections(1, optimizer={"lr": 1e-4})), 1))
        self._worker.reset()

    def logprobs(self, batch: Any) -> torch.Tensor:
        rows = self._rows(batch, compute_loss=False, calculate_entropy=False)
        return no_padding_2_padding(self._worker.infer_batch(rows)["log_probs"], rows).float()

    def update(self, batch: Any, config: Any) -> dict[str, Any]:
        """By verl's own loss; its metrics."""
        self._worker.set_loss_fn(partial(ppo_loss, config))
        rows = self._rows(batch, compute_loss=True, calculate_entropy=False, global_batch_size=len(batch))
        return dict(tu.get(self._worker.train_batch(rows), "metrics"))

    def _rows(self, batch: Any, **settings: Any) -> Any:
        rows = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(rows, micro_batch_size_per_gpu=len(batch), use_dynamic_bsz=False, **settings)
        return rows
