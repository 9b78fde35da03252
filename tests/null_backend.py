"""Whole runs in milliseconds: a backend and an engine without a model, which check what they are told.

The "weights" are a number, the optimizer steps made. A token's log-probability is a function of the token and of the
weights, so every trained token can be checked against the weights of the version that it says it was sampled by.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fakes import CharTokenizer, effective_config
from headrace import registry
from headrace.backends.base import Scorer, Trained
from headrace.config import AlgorithmSection, RunConfig
from headrace.data.episode import FinishReason, Step
from headrace.data.sample import NO_VERSION, Sample, TrainBatch
from headrace.data.task import Task
from headrace.engines.base import EngineAbilities, EngineHealth, Generation, ModelHost, SamplingParams
from headrace.errors import BackendError, EngineError
from headrace.rollout.model_client import Model
from headrace.tracking.metrics import MetricsAggregator, Reducer
from headrace.trainer.callbacks import Callback
from headrace.trainer.trainer import RunResult, UnifiedTrainer
from virtual_time import run_virtual

T = TypeVar("T")
TakesS = Callable[[int], float]
"""How long an answer takes, by the seed of its request."""


def at_once(seed: int) -> float:
    return 0.0


def logprob(token: int, weights: float) -> float:
    """What the policy with these weights gives a token. It goes to and fro, so that old need not be far."""
    return -1.0 - (token % 7) / 8 - (7 * weights % 5) / 64


def reply_ids(seed: int) -> tuple[int, ...]:
    """One to four letters and the end token, by the seed alone."""
    letters = tuple(97 + (seed >> (8 * place)) % 6 for place in range(1 + seed % 4))
    return (*letters, CharTokenizer.eos_token_id)


class NullEngine:
    """Answers at once, or token by token over `takes_s(seed)`. Each token has the version that was live just then."""

    def __init__(self, shares_weights: bool, takes_s: TakesS, by_token: bool = True) -> None:
        self.shares_weights = shares_weights
        self.version = 0
        self.weights = {0: 0.0}
        self.incoming: float | None = None
        self.pinned: int | None = None
        self.changing = False
        """The learner's weights are no longer those of any version; it says so where they are shared."""
        self.learning = False
        self.tokens = self.tokens_while_learning = 0
        self.running = self.most_running = self.caches_released = 0
        self.closed = False
        self._takes_s = takes_s
        self._by_token = by_token
        self._going = asyncio.Event()
        self._going.set()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        self._require(not self.closed, "a request came after close")
        ids = reply_ids(seed)[: params.max_tokens]
        pauses = len(ids) if self._by_token else 1
        pause_s, pin = self._takes_s(seed) / pauses, self.pinned if pinned else None
        versions: list[int] = []
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for place in range(len(ids)):
                if pause_s and place < pauses:
                    await asyncio.sleep(pause_s)
                while not self._going.is_set():
                    await self._going.wait()
                versions.append(self._sampled(pin))
        finally:
            self.running -= 1
        logprobs = tuple(logprob(token, self.weights[v]) for token, v in zip(ids, versions, strict=True))
        stopped = ids[-1] == CharTokenizer.eos_token_id
        return Generation(
            prompt_ids=tuple(prompt_ids),
            completion_ids=ids,
            logprobs=logprobs,
            model_logprobs=logprobs,
            versions=tuple(versions),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            temperature=1.0 if params.temperature is None else params.temperature,
        )

    def _sampled(self, pin: int | None) -> int:
        """One token; the version that sampled it."""
        self._require(pin is not None or not self.changing, "a token was sampled while the shared weights changed")
        self._require(not self.closed, "a token was sampled after close")
        self.tokens += 1
        self.tokens_while_learning += self.learning
        return self.version if pin is None else pin

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[logprob(token, self.weights[self.version]) for token in row[1:]] for row in rows]

    async def pause(self) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._require(not self.changing, "the engine was resumed before it was told of the new version")
        self._going.set()

    async def begin_update(self, version: int) -> None:
        self._require(self.incoming is None, "an update began within another")
        self._require(self.paused or not self.shares_weights, "shared weights were updated without a pause")

    async def end_update(self, version: int) -> str:
        weights, self.incoming = self.incoming, None
        self._require(weights is not None, "an update ended without weights")
        self.version, self.weights[version], self.changing = version, weights or 0.0, False
        return f"weights {weights:g}"

    async def pin(self) -> int:
        self._require(self.pinned is None, "weights were pinned twice")
        self._require(not self.changing, "weights were pinned while they changed")
        self.pinned = self.version
        return self.version

    async def unpin(self) -> None:
        self._require(self.pinned is not None, "unpin came without pin")
        self.pinned = None

    async def release_cache(self) -> None:
        self._require(not self.decoding, "the cache was released while the engine decoded")
        self.caches_released += 1

    async def restart(self) -> None: ...

    @property
    def paused(self) -> bool:
        return not self._going.is_set()

    @property
    def decoding(self) -> bool:
        return self.running > 0 and not self.paused

    def health(self) -> EngineHealth:
        return EngineHealth(not self.closed, self.paused, self.version, self.running, 0, self.tokens, 0.0)

    async def close(self) -> None:
        self.closed = True

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:  # not an assertion: in a workflow that would be a failed episode
            raise EngineError(f"broken protocol: {otherwise}")


class NullBackend:
    """Counts. `steps` has, for every optimizer step, the version it was made at and the rows it trained."""

    tokenizer = CharTokenizer()
    transports: ClassVar[tuple[str, ...]] = ("in_place", "a number")

    def __init__(self, config: RunConfig, null: Null | None = None) -> None:
        self.null = null or Null()
        self.engine = NullEngine(config.trainer.placement == "colocate", self.null.takes_s, self.null.by_token)
        self.weights = 0.0
        self.steps: list[tuple[int, list[Sample]]] = []
        self.synced: list[int] = []
        self.scored = self.forwards = 0
        self.closed = False
        self._accumulated: list[Sample] = []
        self._stepped = True  # at first, the weights of the model are sent as they are

    @staticmethod
    def check(config: RunConfig) -> None: ...

    def host(self, transport: str) -> ModelHost:
        return ModelHost(self.tokenizer, (CharTokenizer.eos_token_id,), None, weights=self, sender=self)

    @property
    def in_place(self) -> bool:
        return self.engine.shares_weights

    async def digest(self) -> str:
        return f"weights {self.weights:g}"

    async def forward_backward(self, batch: TrainBatch, algorithm: AlgorithmSection) -> Trained:
        self._require(bool(batch.samples), "forward_backward got an empty batch")
        for sample in batch.samples if self.null.checks else ():
            self._check_row(sample)
        self._accumulated += batch.samples
        self.forwards += 1
        await self._learn()
        metrics = MetricsAggregator()
        metrics.record("tokens/trained", sum(sample.trained_tokens for sample in batch.samples), Reducer.SUM)
        logprobs = tuple(self._trained_logprobs(sample) for sample in batch.samples)
        entropies = tuple(tuple(value / 2 + self.weights for value in row) for row in logprobs)
        clipped = tuple(tuple(int(value < -3) for value in row) for row in logprobs)
        return Trained(metrics, logprobs, frozenset(), entropies, clipped)

    async def optim_step(self, lr: float, grad_scale: float) -> MetricsAggregator:
        self._require(bool(self._accumulated), "optim_step came without forward_backward")
        self._require(lr > 0 and 0 < grad_scale < float("inf"), f"lr {lr} or grad_scale {grad_scale} is no factor")
        if self.engine.shares_weights:
            self._require(not self.engine.decoding, "weights changed while the engine decoded with them")
            self.engine.changing = True
        await self._learn()
        self.weights += 1.0
        self.steps.append((self.engine.version, self._accumulated if self.null.remembers else []))
        self._accumulated, self._stepped = [], True
        return MetricsAggregator()

    async def compute_logprobs(self, batch: TrainBatch, of: Scorer = "policy") -> list[list[float]]:
        self.scored += len(batch.samples)
        weights = self.weights if of == "policy" else 0.0
        return [[logprob(token, weights) for token in sample.tokens[1:]] for sample in batch.samples]

    async def compute_values(self, batch: TrainBatch) -> list[list[float]]:
        return [[0.0] * len(sample.loss_mask) for sample in batch.samples]

    async def teacher_logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        return [[logprob(token, 0.0) for token in step.response_ids] for step in steps]

    async def refresh_teacher(self) -> None: ...

    async def send(self, version: int) -> None:
        self._require(not self._accumulated, "weights were sent between forward_backward and optim_step")
        self._require(self._stepped, "weights were sent that had not changed")
        expected = self.synced[-1] + 1 if self.synced else version
        self._require(version == expected, f"version {version} was sent, and not {expected}")
        self._stepped = False
        self.synced.append(version)
        self.engine.incoming = self.weights

    async def save(self, folder: Path) -> None:
        self._require(not self._accumulated, "save came in the middle of a step")
        _write(folder, {"weights": self.weights, "versions": self.engine.weights})

    async def load(self, folder: Path) -> None:
        found = _read(folder)
        self.weights = found["weights"]
        self.engine.weights = {int(version): weights for version, weights in found["versions"].items()}

    async def export(self, folder: Path) -> None:
        await self.save(folder)

    async def close(self) -> None:
        self._require(self.engine.closed, "the backend was closed before the engine that uses it")
        self.closed = True

    async def _learn(self) -> None:
        """As long as a pass takes: others go on, even if it takes no time."""
        self.engine.learning = True
        await asyncio.sleep(self.null.learn_s)
        self.engine.learning = False

    def _trained_logprobs(self, sample: Sample) -> tuple[float, ...]:
        return tuple(logprob(token, self.weights) for token in compress(sample.tokens[1:], sample.loss_mask))

    def _check_row(self, sample: Sample) -> None:
        """Every sampled token carries the log-probability that the version it names gave it."""
        self._require(sample.trained_tokens > 0, "a row without anything to train")
        for token, mask, found, version in zip(
            sample.tokens[1:], sample.loss_mask, sample.logprobs, sample.versions, strict=True
        ):
            if version == NO_VERSION:
                self._require(not mask, "a token is trained that no version sampled")
            else:
                self._require(version in self.engine.weights, f"version {version} was never published")
                self._require(found == logprob(token, self.engine.weights[version]), "a token's logprob is another's")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise BackendError(f"broken protocol: {otherwise}")

    # ---- for tests ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Sample]:
        """All rows that were trained, in order."""
        return [sample for _, samples in self.steps for sample in samples]

    @property
    def ages(self) -> list[int]:
        """Per optimizer step, the age of the oldest token that it trained."""
        return [max(version - oldest(sample) for sample in samples) for version, samples in self.steps]


def _write(folder: Path, state: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "null.json").write_text(json.dumps(state))


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "null.json").read_text())


def oldest(sample: Sample) -> int:
    """The version of the oldest trained token."""
    return min(compress(sample.versions, sample.loss_mask))


@dataclass
class Null:
    """The backend "null" as it is registered: makes backends, and keeps them.

    `learn_s` is what each pass and each optimizer step takes. Not `by_token`, an answer comes as a whole. Without
    `checks` rows are not looked at, and with `remembers` false not kept.
    """

    takes_s: TakesS = at_once
    learn_s: float = 0.0
    by_token: bool = True
    checks: bool = True
    remembers: bool = True
    made: list[NullBackend] = field(default_factory=list)
    transports: ClassVar[tuple[str, ...]] = NullBackend.transports

    def check(self, config: RunConfig) -> None: ...

    def __call__(self, config: RunConfig) -> NullBackend:
        self.made.append(NullBackend(config, self))
        return self.made[-1]


class NullEngines:
    """The engine "null" as it is registered: that of the backend "null"."""

    def abilities(self, config: RunConfig) -> EngineAbilities:
        return EngineAbilities(("in_place",) if config.trainer.placement == "colocate" else ("a number",))

    def __call__(self, config: RunConfig, host: ModelHost) -> NullEngine:
        assert isinstance(host.sender, NullBackend)
        return host.sender.engine


NULL_ENGINE = NullEngines()
registry.register("engine", "null", NULL_ENGINE)


@dataclass(frozen=True)
class Ran:
    """A run, looked at from outside."""

    result: RunResult
    backend: NullBackend
    rows: list[dict[str, float]]
    """What it reported of each step."""


async def scattered(task: Task, model: Model) -> float:
    """A workflow whose rewards differ within a group, at least mostly."""
    reply = await model.chat(task.messages)
    return float(sum(reply.completion_ids) % 5)


def some_tasks(count: int = 24) -> list[Task]:
    return [Task(f"task {number}", instruction=f"Say {number}.") for number in range(count)]


def null_config(run_dir: Path, **sections: Any) -> RunConfig:
    """A short run of small batches; `sections` go over it."""
    small: dict[str, Any] = {
        "run": {"dir": str(run_dir)},
        "backend": {"name": "null"},
        "rollout": {"group_size": 2, "max_tokens": 8},
        "trainer": {"steps": 6, "batch_size": 3, "save_last": False},
        "track": {"trackers": ["jsonl"], "plot": False},
        "eval": {"before": False, "after": False},
        "engine": {"name": "null", "health_every_s": 1000.0},  # or a hang would be a million looks
        "ledger": {"enabled": False},  # it syncs the disk at every step
    }
    return effective_config({key: {**small.get(key, {}), **sections.get(key, {})} for key in {*small, *sections}})


def null_trainer(
    run_dir: Path,
    run: Any = scattered,
    tasks: Sequence[Task] | None = None,
    /,
    null: Null | None = None,
    callbacks: Sequence[Callback] = (),
    **sections: Any,
) -> UnifiedTrainer:
    """A trainer whose backend is made by `null`; everything has a default."""
    registry.register("backend", "null", null or Null())
    config = null_config(run_dir, **sections)
    return UnifiedTrainer(config, run, some_tasks() if tasks is None else tasks, callbacks=callbacks)


def null_run(run_dir: Path, *args: Any, null: Null | None = None, **given: Any) -> Ran:
    """A whole run on the virtual clock. It must leave neither tasks nor an open engine behind."""
    null = null or Null()
    trainer = null_trainer(run_dir, *args, null=null, **given)
    with redirect_stdout(StringIO()):  # the summary of a run is of no interest
        result = run_virtual(_leaving_nothing(trainer.fit_async()))
    backend = null.made[-1]
    assert backend.closed and not backend.engine.running
    return Ran(result, backend, reported(result.run_dir))


def reported(run_dir: Path) -> list[dict[str, float]]:
    """What a run reported of each step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"]]


async def _leaving_nothing(work: Coroutine[Any, Any, T]) -> T:
    before = asyncio.all_tasks()
    try:
        return await work
    finally:
        left = asyncio.all_tasks() - before
        assert not left, f"tasks are left behind: {left}"
