"""Whole runs that can be looked into: a local backend that remembers what it was asked, and transformers beside it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fakes import effective_config
from headrace import registry
from headrace.algorithms.batching import pack
from headrace.backends.base import Scorer, Trained
from headrace.backends.local.backend import LocalBackend
from headrace.backends.setup import Policy, attach_engine, choose
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config
from headrace.data.episode import Step, TrajectoryGroup
from headrace.data.sample import Sample, TrainBatch
from headrace.data.task import Task
from headrace.engines.base import ModelHost, SamplingParams
from headrace.models.catalog import resolve_model
from headrace.rollout.agent_loop import AgentLoop
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model
from headrace.trainer.trainer import RunResult, UnifiedTrainer

FLOAT64: dict[str, Any] = {"model": {"dtype": "float64"}}
QUIET: dict[str, Any] = {"track": {"trackers": ["jsonl"], "plot": False}}


class WatchedBackend(LocalBackend):
    """A LocalBackend that keeps what it trained on, what it was asked, and how its weights stood."""

    made: ClassVar[list[WatchedBackend]] = []

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.batches: list[tuple[TrainBatch, AlgorithmSection]] = []
        self.referenced: list[tuple[Sample, ...]] = []
        self.taught: list[tuple[tuple[Step, ...], list[list[float]]]] = []
        self.teachers: list[tuple[int, dict[str, Tensor]]] = []
        self.sent: dict[int, dict[str, Tensor]] = {0: snapshot(self.learner.hf_model)}
        WatchedBackend.made.append(self)

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        self.batches.append((batch, algorithm))
        return await super().forward_backward(batch, algorithm)

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        if of == "reference":
            self.referenced.append(batch.samples)
        return await super().compute_logprobs(batch, of)

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        found = await super().teacher_logprobs(steps)
        assert self.learner.teacher is not None
        self.taught.append((tuple(steps), found))
        self.teachers.append((id(self.learner.teacher), snapshot(self.learner.teacher.hf_model)))
        return found

    def host(self, transport: str) -> ModelHost:
        host = super().host(transport)
        sender: Any = host.sender
        send = sender.send

        async def send_and_keep(version: int) -> None:
            self.sent[version] = snapshot(self.learner.hf_model)
            await send(version)

        sender.send = send_and_keep
        return host

    @property
    def samples(self) -> list[Sample]:
        """Rows of all steps, in order."""
        return [sample for batch, _ in self.batches for sample in batch.samples]


registry.register("backend", "watched", WatchedBackend)


def watched_config(run_dir: Path, **sections: Any) -> RunConfig:
    """A short run of small batches on the bundled model; `sections` go over it."""
    small: dict[str, Any] = {
        **QUIET,
        "run": {"dir": str(run_dir), "deterministic": True},
        "backend": {"name": "watched"},
        "rollout": {"group_size": 4, "max_tokens": 8},
        "trainer": {"steps": 1, "batch_size": 2, "save_last": False},
        "data": {"args": {"count": 16}},
    }
    return effective_config({key: {**small.get(key, {}), **sections.get(key, {})} for key in {*small, *sections}})


def watched_run(
    run_dir: Path, run: Any = None, tasks: Sequence[Task] | None = None, **sections: Any
) -> tuple[RunResult, WatchedBackend]:
    """Train, with the workflow `run` if it is given; the result, and the backend that trained."""
    torch.set_num_threads(1)
    result = UnifiedTrainer(watched_config(run_dir, **sections), run, tasks).fit()
    return result, WatchedBackend.made.pop()


def with_engine(backend: LocalBackend) -> Policy:
    """The backend with the engine of its configuration, and the weight sync between them."""
    return attach_engine(backend.learner.config, backend, choose(backend.learner.config))


def make_backend(**sections: Any) -> WatchedBackend:
    """A backend without a trainer."""
    torch.set_num_threads(1)
    return WatchedBackend(build_config(sections))


def snapshot(model: Any) -> dict[str, Tensor]:
    """A copy of all weights."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same_weights(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def take_gradient(backend: LocalBackend) -> dict[str, Tensor]:
    """What has accumulated; afterwards nothing has."""
    named = dict(backend.learner.modules().named_parameters())
    found = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    backend.learner.optimizer.zero_grad(set_to_none=True)
    return found


def assert_same_gradient(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Equal up to `tolerance`, as a share of the largest entry."""
    assert got.keys() == want.keys()
    largest = max(float(gradient.abs().max()) for gradient in want.values())
    assert largest > 0
    for name in want:
        assert float((got[name] - want[name]).abs().max()) <= tolerance * largest, name


def plain_model(name: str = "bundled", dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it: nothing of Headrace is in its forward."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=dtype).eval()
    for module in model.modules() if dtype == torch.float64 else ():
        if type(module).__name__ == "LlamaRMSNorm":  # which computes in float32 whatever it is given
            module.forward = functools.partial(_rms_norm, module)
    return model


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def plain_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probability of every token but the first, through transformers."""
    ids = torch.tensor([list(tokens)])
    logits = model(ids, use_cache=False).logits[0, :-1].to(torch.promote_types(model.dtype, torch.float32))
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, 1:, None]).squeeze(1)


def trained(sample: Sample, values: Sequence[float] | Tensor) -> list[float]:
    """The entries of a row that the loss counts."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    return [value for value, kept in zip(listed, sample.loss_mask, strict=True) if kept]


def logged(run_dir: Path) -> list[dict[str, float]]:
    """What the run reported of each optimizer step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"]]


async def gradient(backend: LocalBackend, samples: Sequence[Sample], algorithm: AlgorithmSection) -> dict[str, Tensor]:
    """The summed gradient of some rows."""
    await backend.forward_backward(pack(samples, algorithm, 512), algorithm)
    return take_gradient(backend)


async def scattered_reward(task: Task, model: Model) -> float:
    """A workflow whose rewards differ within a group."""
    reply = await model.chat(task.messages)
    return float(sum(reply.completion_ids) % 5)


async def sampled_groups(backend: LocalBackend) -> list[TrajectoryGroup]:
    """Four real rollouts as groups of one, with rewards 0 and 1."""
    engine = with_engine(backend).engine

    async def ask(task: Task, model: Model) -> float:
        await model.chat(task.messages)
        return float(task.id)

    manager = AgentLoop(ask, engine, ChatTemplate(backend.tokenizer), None)
    groups = []
    for index in range(4):
        task = Task(str(index % 2), instruction=f"Make {index + 7} from 1 2 3. Use each number once.")
        (episode,) = await manager.roll_out_group(task, index, 1, 5, SamplingParams(1.0, 1.0, 0, 6))
        groups.append(TrajectoryGroup(str(index), "agent", episode.trajectories, index))
    await engine.close()
    return groups
