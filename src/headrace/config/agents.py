"""What agents do, how they are judged, and what they sample with."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

import headrace.config.conditions as when
from headrace.config.base import LONGEST_S, MOST_TOKENS, Section
from headrace.config.effect import always, declare
from headrace.utils.loopback import is_loopback


class WorkflowSection(Section):
    """What the agent does and how it is judged."""

    name: str = "single_turn"
    """A registered workflow, "module:function" or "file.py:function" of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of a workflow class."""
    grouping: str | None = None
    """Which trajectories are compared: "by_step", or "module:function" of (episodes of one task) that returns
    TrajectoryGroups; empty compares those of the same role."""
    judger: str | None = None
    """Who scores episodes whose workflow gave no reward: a registered judger or "module:object"; empty for none."""
    judger_args: dict[str, Any] = {}
    """Keyword arguments of a judger class."""

    effects: ClassVar = declare(
        when.USES_WORKFLOW("name", "args"),
        when.ROLLS_OUT("grouping"),
        when.COMPARES_STEPS("grouping"),
        when.SAMPLES("judger", "judger_args"),
        when.NAMED_JUDGER("judger_args"),
    )


class JudgeSection(Section):
    """Who judges which task, and what becomes of a judger's failure."""

    routes: dict[str, dict[str, Any]] = {}
    """Source of the task to its judger, {name = ..., args = {...}}; "*" for every other source. Instead of
    workflow.judger."""
    concurrency: int = Field(default=64, ge=1, le=65_536)
    """Episodes judged at once."""
    timeout_s: float = Field(default=120.0, gt=0, le=LONGEST_S)
    """Longest duration of judging one episode, waiting for a free place not counted."""
    retries: int = Field(default=2, ge=0, le=1000)
    """How often judging is tried again if infrastructure failed: a connection, a time-out, a sandbox."""
    on_failure: Literal["fail_episode", "stop"] = "fail_episode"
    """What a judger's failure does: the episode fails (it does not count as wrong), or the run ends."""

    effects: ClassVar = declare(
        when.SAMPLES("routes", "concurrency", "timeout_s", "retries", "on_failure"),
        when.JUDGED("concurrency", "timeout_s", "retries", "on_failure"),
    )


class GatewaySection(Section):
    """The HTTP server through which programs outside reach the model."""

    host: str = "127.0.0.1"
    """Address that it listens at. One that others can reach needs a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port that it listens at; 0 takes a free one."""
    token: str | None = None
    """What clients must send as API key: "$NAME" of the environment variable that holds it. The token itself does not
    belong into a run file, which is copied into the run's folder."""
    public_host: str | None = None
    """Name under which programs elsewhere reach this machine; empty for host."""
    max_body_mb: float = Field(default=32.0, gt=0, le=65_536)
    """Largest request, in MB."""
    keep_alive_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """Seconds between signs of life to a client that waits for a streamed reply."""
    unsupported: Literal["refuse", "warn"] = "refuse"
    """What is done about fields of a request that cannot be honoured: the request is refused, or it is answered
    without them, with one warning for each."""

    effects: ClassVar = when.GATEWAY(
        "host", "port", "token", "public_host", "max_body_mb", "keep_alive_s", "unsupported"
    )

    @field_validator("token")
    @classmethod
    def _is_named(cls, token: str | None) -> str | None:
        if token and not token.startswith("$"):
            raise ValueError('must be "$NAME" of an environment variable that holds it; the token itself is not stored')
        return token

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> Self:
        if not self.token and not is_loopback(self.host):
            raise ValueError(
                f'host "{self.host}" can be reached from other machines, and there is no token; '
                'set gateway.token, or leave gateway.host at "127.0.0.1"'
            )
        return self


class RolloutSection(Section):
    """How tasks are rolled out."""

    group_size: int = Field(default=8, ge=1, le=4096)
    """Rollouts of each task, compared with each other."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Sampling temperature; the learner scales its logits the same way."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution."""
    top_k: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Sample among the k likeliest tokens; 0 for all."""
    max_tokens: int = Field(default=256, ge=1, le=MOST_TOKENS)
    """Longest response, in tokens, of one model call that sets no limit of its own."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the tokenizer's end-of-sequence token always does."""
    max_concurrent: int = Field(default=256, ge=1, le=65_536)
    """Episodes in flight at once."""
    timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """Longest duration of one episode; over it, the episode fails with reason "timeout"."""
    max_turns: int | None = Field(default=None, ge=1, le=1_000_000)
    """Most model calls of one episode; one more ends it with reason "turns". Empty for no limit."""
    max_episode_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Most tokens sampled in one episode, over all its calls; then it ends with reason "tokens". Empty for no limit."""
    max_tool_calls: int | None = Field(default=None, ge=1, le=1_000_000)
    """Most tool calls of one episode; one more ends it with reason "tools". Empty for no limit."""
    retries: int = Field(default=2, ge=0, le=1000)
    """How often an episode is started again if infrastructure failed (a connection, a server, a sandbox). Failures of
    your own code are not tried again."""

    effects: ClassVar = declare(
        when.ROLLS_OUT("group_size", "temperature", "top_p", "top_k"),
        when.SAMPLES("max_tokens", "stop", "max_concurrent", "timeout_s", "max_turns", "max_episode_tokens"),
        when.SAMPLES("max_tool_calls", "retries"),
        when.SEVERAL_TURNS("max_turns"),
        when.BELOW_ONE_REPLY("max_episode_tokens"),
        when.TOOLS("max_tool_calls"),
    )


Weights = Literal["float32", "bfloat16", "int8"]


class EngineSection(Section):
    """What generates tokens."""

    name: str = "torch"
    """A registered rollout engine; backend "local" samples with "torch"."""
    max_batch: int = Field(default=128, ge=1, le=65_536)
    """Sequences decoded together."""
    max_model_length: int | None = Field(default=None, ge=2, le=MOST_TOKENS)
    """Longest prompt plus response, in tokens; empty takes the model's own limit."""
    prefill_tokens: int = Field(default=8192, ge=1, le=MOST_TOKENS)
    """Prompt tokens computed at once."""
    kept_tokens: int = Field(default=16384, ge=0, le=MOST_TOKENS)
    """Tokens of ended replies whose keys and values are kept for the next turn of their conversations. None are kept
    before a first prompt goes on from a reply, nor with run.deterministic."""
    health_every_s: float = Field(default=2.0, gt=0, le=LONGEST_S)
    """Seconds between two looks at the engine's health."""
    weights: Weights = "float32"
    """What replies are decoded with: the weights as they are, or rounded to fewer bits at each publication, which are
    read faster while few sequences are decoded. The loss must correct for the difference."""
    cache_on_publish: Literal["keep", "recompute"] = "keep"
    """What new weights do to the keys and values of sequences in flight: those of the old weights are kept, or all are
    computed again."""
    threads: int = Field(default=0, ge=0, le=4096)
    """Threads of a separate engine; 0 takes half the cores, and leaves the others to the learner; with
    run.deterministic, as many as the learner has."""

    effects: ClassVar = declare(
        always("name", "max_model_length"),
        when.SAMPLES("max_batch", "prefill_tokens", "kept_tokens", "weights", "threads", "health_every_s"),
        when.NOT_TINKER("prefill_tokens", "kept_tokens", "weights", "threads"),
        when.NOT_DETERMINISTIC("kept_tokens"),
        when.SEVERAL_TURNS("kept_tokens"),
        when.AHEAD("cache_on_publish"),
        when.PARTIAL("cache_on_publish"),
        when.TINKER_SEGMENTS("cache_on_publish"),
        when.SEPARATE("threads"),
    )
