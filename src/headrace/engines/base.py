"""What a rollout engine is: the protocol, what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from headrace.config import RunConfig
from headrace.config.base import LEAST_TEMPERATURE
from headrace.data.routing import RoutedExperts
from headrace.errors import ConfigError
from headrace.weights.base import WeightSender, WeightSource
from headrace.weights.canary import Score


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. None means the engine's or the caller's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.temperature is not None and not (self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE):
            raise ConfigError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, got {self.temperature:g}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (all) or above, got {self.top_k}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if isinstance(self.stop, str) or (self.stop and not all(self.stop)):
            raise ConfigError(f"stop must be a tuple of strings that are not empty, got {self.stop!r}")

    def filled(self, defaults: SamplingParams) -> SamplingParams:
        """A copy in which what is None here is taken from `defaults`."""
        names = ("temperature", "top_p", "top_k", "max_tokens", "stop")
        return replace(self, **{n: getattr(defaults, n) for n in names if getattr(self, n) is None})


DEFAULT_SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=256, stop=())


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request produced. `logprobs` are under the sampling distribution, `model_logprobs` at temperature 1; the
    latter are empty where an engine does not return them (`EngineAbilities.model_logprobs`)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    temperature: float
    routed_experts: RoutedExperts | None = None
    """Of every token but the last, if the run asks for them (`backend.routing_replay`)."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot for people and watchdogs."""

    alive: bool
    paused: bool
    version: int
    running: int
    waiting: int
    generated_tokens: int
    busy_s: float
    error: str | None = None
    restarts: int = 0
    state: str = "serving"
    """"serving"; "unsynced": it answers, but does not have the current weights; "starting": it is started again."""
    reissued: int = 0
    """Requests that were issued again, with the same seeds, because who had them was lost."""
    replicas: tuple[EngineHealth, ...] = ()
    """Of a pool, each of its engines."""
    pinned: int | None = None
    """The version that it still has for pinned requests, if it was asked to keep one."""


def pool_metrics(health: EngineHealth) -> dict[str, float]:
    """How the replicas of a pool are, and how much each has to do; nothing for an engine that is alone."""
    if not health.replicas:
        return {}
    found: dict[str, float] = {
        "engine/serving": sum(one.state == "serving" and one.error is None for one in health.replicas),
        "engine/restarts": health.restarts,
        "engine/reissued": health.reissued,
    }
    for number, one in enumerate(health.replicas):
        found[f"engine/replica/{number}/requests"] = one.running + one.waiting
        found[f"engine/replica/{number}/tokens"] = one.generated_tokens
        found[f"engine/replica/{number}/restarts"] = one.restarts
    return found


class Generates(Protocol):
    """All that an agent needs of an engine."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        """Sample one completion. Its random numbers depend on (seed, position) only."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """What an engine can do. Start-up rules read it, so that no run begins with an engine that cannot serve it."""

    transports: tuple[str, ...]
    """How it can take weights, the preferred way first."""
    exact_seeds: bool = True
    """The tokens of a request depend on nothing but its weights, prompt and seed; `run.deterministic` needs it."""
    pins: bool = True
    """It can keep one version for pinned requests while it serves newer ones; evaluation beside training needs it."""
    digests: bool = True
    """It takes the digest of what it decodes with. Otherwise canary rows are the proof, scored by both sides."""
    pauses_to_sync: bool = False
    """It must not decode while weights travel."""
    model_logprobs: bool = True
    """It returns log-probabilities at temperature 1 beside those of the sampling distribution. Otherwise a request
    whose sampling changes the distribution comes without."""
    cache_on_sync: tuple[str, ...] = ("keep", "recompute")
    """What it can do with the cache of sequences in flight when new weights arrive (`engine.cache_on_publish`)."""
    in_flight: bool = True
    """Sequences in flight continue with new weights; otherwise they end with those they began with."""
    routed_experts: bool = False
    """It returns the experts that tokens were routed to; `backend.routing_replay` needs it."""


@dataclass(frozen=True, slots=True)
class ModelHost:
    """What a backend lends to the engine of its run."""

    tokenizer: Any
    eos_ids: tuple[int, ...]
    max_length: int | None
    """The longest row that the model reads; None if the backend does not know."""
    weights: WeightSource
    sender: WeightSender
    """Of the transport that was chosen; the engine takes the other end of it."""
    score: Score | None = None
    """The learner's log-probabilities of rows under its weights as they are now; None if it cannot say."""
    vocabulary: int | None = None
    """Token ids that the model knows; None if the backend does not know."""
    dtype: str | None = None
    """What `model.dtype` comes to on the learner's device; None if the backend does not know."""


class RolloutEngine(Protocol):
    """Tokens in; tokens, log-probabilities and versions out."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        """Sample one completion. Its random numbers depend on (seed, position) only.

        Pinned requests go before all that wait, and are decoded with the pinned weights if there are any.
        """
        ...

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each row, the log-probability at temperature 1 of every token but the first."""
        ...

    async def pause(self) -> None:
        """Stop decoding between two tokens; requests stay where they are."""
        ...

    async def resume(self) -> None:
        """Continue decoding."""
        ...

    async def begin_update(self, version: int) -> None:
        """Make ready for new weights, which the sender brings before `end_update`."""
        ...

    async def end_update(self, version: int) -> str | None:
        """Decode with the weights that were sent, from one token to the next; the digest of what is decoded with.

        The digest is taken here, of what decoding reads: it is the proof that the weights arrived. None from an
        engine that cannot take it: then canary rows are the proof.
        """
        ...

    async def pin(self) -> int:
        """Keep the weights served now for pinned requests, whatever is synced later; returns their version."""
        ...

    async def unpin(self) -> None:
        """Let the pinned weights go, once the pinned requests under way have ended."""
        ...

    async def release_cache(self) -> None:
        """Give cache memory back while the engine is paused or idle; it is rebuilt when decoding continues."""
        ...

    async def restart(self) -> None:
        """Throw all decoding state away; requests under way are decoded again from their beginning."""
        ...

    def health(self) -> EngineHealth:
        """What the engine is doing now."""
        ...

    async def close(self) -> None:
        """Stop; requests still under way fail."""
        ...


class EngineFactory(Protocol):
    """What an engine's name stands for: an engine's class, or an object that makes engines."""

    def abilities(self, config: RunConfig) -> EngineAbilities:
        """What the engine will be able to do; ConfigError, with the remedy, for an option that it cannot honour.

        Called before anything is loaded, also by a dry run.
        """
        ...

    def __call__(self, config: RunConfig, host: ModelHost) -> RolloutEngine:
        """The engine. `host.sender` is of a transport that is among its abilities."""
        ...


class Routes(Protocol):
    """What a pool has beside: requests that belong together go to one replica, whose cache has their beginning."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False,
        affinity: str | None = None,
    ) -> Generation:  # fmt: skip
        """As every engine; requests with the same `affinity` belong together."""
        ...

    routes: Literal[True]


class ConversationView:
    """An engine as one conversation, or the conversations of one group, see it."""

    def __init__(self, engine: Routes, affinity: str, pinned: bool = False) -> None:
        self._engine, self._affinity, self._pinned = engine, affinity, pinned

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        return await self._engine.generate(prompt_ids, params, seed, pinned=self._pinned, affinity=self._affinity)


class EvaluationView:
    """An engine as evaluation sees it: all its requests are pinned."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        return await self._engine.generate(prompt_ids, params, seed, pinned=True)

    def conversation(self, affinity: str) -> Generates:
        """Itself, or of a pool the replica that serves the conversation."""
        pool = _pool(self._engine)
        return self if pool is None else ConversationView(pool, affinity, pinned=True)


def of_conversation(engine: Generates, affinity: str) -> Generates:
    """The engine for a conversation: where there are several, always the same one."""
    if isinstance(engine, EvaluationView):
        return engine.conversation(affinity)
    pool = _pool(engine)
    return engine if pool is None else ConversationView(pool, affinity)


def _pool(engine: Any) -> Routes | None:
    # not isinstance: with a protocol that takes longer than all else here, and this is done for every episode
    return engine if getattr(engine, "routes", False) else None
