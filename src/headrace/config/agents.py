"""Workflows, judgers, the gateway, sampling limits and the engine."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

import headrace.config.conditions.agents as when
from headrace.config.base import LONGEST_S, MOST_TOKENS, Section, Temperature
from headrace.config.conditions import shared
from headrace.config.effect import always, declare
from headrace.utils.loopback import is_loopback


class WorkflowSection(Section):
    """What the agent does and how it is judged."""

    name: str = "single_turn"
    """A registered workflow, "module:function" or "file.py:function" of your own, or "verl:module:Class" of an agent
    loop of verl."""
    args: dict[str, Any] = {}
    """Keyword arguments of a workflow class."""
    grouping: str | None = None
    """Which trajectories are compared with each other. Empty: those of the same role. "by_step": the same step of each
    rollout. Or "module:function" of your own, from the episodes of one task to TrajectoryGroups."""
    judger: str | None = None
    """Judger of episodes whose workflow returned no reward: a registered name or "module:object"; empty for none."""
    judger_args: dict[str, Any] = {}
    """Keyword arguments of a judger class."""

    effects: ClassVar = declare(
        when.USES_WORKFLOW("name", "args"),
        shared.ROLLS_OUT("grouping"),
        when.COMPARES_STEPS("grouping"),
        shared.SAMPLES("judger", "judger_args"),
        when.NAMED_JUDGER("judger_args"),
    )


class JudgeSection(Section):
    """Judgers by source, and how judging is limited and retried."""

    routes: dict[str, dict[str, Any]] = {}
    """Judger of each task source, { name = ..., args = {...} }; "*" for every other source. Use it instead of
    workflow.judger."""
    concurrency: int = Field(default=64, ge=1, le=65_536)
    """Episodes judged at once."""
    timeout_s: float = Field(default=120.0, gt=0, le=LONGEST_S)
    """Time limit for judging one episode, without waiting for a free slot."""
    retries: int = Field(default=2, ge=0, le=1000)
    """How often judging is retried if infrastructure failed: a connection, a time-out, a sandbox."""
    on_failure: Literal["fail_episode", "stop"] = "fail_episode"
    """A judge call that failed fails the episode (which does not count as wrong), or stops the run."""
    placement: Literal["local", "ray"] = "local"
    """Where judgers run: in the trainer's process, or as actors on the cluster ([cluster])."""
    actors: int = Field(default=2, ge=1, le=65_536)
    """Judger actors on the cluster; judge.concurrency is the number of episodes judged at once by all of them."""

    effects: ClassVar = declare(
        shared.SAMPLES("routes", "concurrency", "timeout_s", "retries", "on_failure", "placement", "actors"),
        when.JUDGED("concurrency", "timeout_s", "retries", "on_failure", "placement", "actors"),
        when.JUDGED_ON_RAY("actors"),
    )


class GatewaySection(Section):
    """The HTTP server through which other programs call the model."""

    host: str = "127.0.0.1"
    """Address that it listens at. An address that other machines can reach needs a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port that it listens at; 0 takes a free one."""
    token: str | None = None
    """API key that clients must send, as "$NAME" of the environment variable that holds it. The key itself is refused:
    run files are copied into the run's folder."""
    public_host: str | None = None
    """Name under which programs elsewhere reach this machine; empty for host."""
    max_body_mb: float = Field(default=32.0, gt=0, le=65_536)
    """Largest request, in MB."""
    keep_alive_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """Seconds between keep-alive messages to a client that waits for a streamed reply."""
    unsupported: Literal["refuse", "warn"] = "refuse"
    """Request fields that the gateway does not support: refuse the request, or warn once per field and ignore it."""

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
    """Group size, sampling and limits of rollouts."""

    group_size: int = Field(default=8, ge=1, le=4096)
    """Rollouts of each task, compared with each other."""
    temperature: Temperature = 1.0
    """Sampling temperature; the learner scales its logits the same way."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the full distribution."""
    top_k: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Sample among the k most likely tokens; 0 for all."""
    max_tokens: int = Field(default=256, ge=1, le=MOST_TOKENS)
    """Most tokens of one reply, unless the model call sets its own limit."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply; the tokenizer's end-of-sequence token always does."""
    max_concurrent: int = Field(default=256, ge=1, le=65_536)
    """Episodes in flight at once."""
    timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """Time limit of one episode; an episode that exceeds it fails with reason "timeout"."""
    max_turns: int | None = Field(default=None, ge=1, le=1_000_000)
    """Most model calls of one episode; one more ends it with reason "turns". Empty for no limit."""
    max_episode_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Most tokens sampled in one episode, over all its calls; then it ends with reason "tokens". Empty for no limit."""
    max_tool_calls: int | None = Field(default=None, ge=1, le=1_000_000)
    """Most tool calls of one episode; one more ends it with reason "tools". Empty for no limit."""
    retries: int = Field(default=2, ge=0, le=1000)
    """How often an episode is restarted if infrastructure failed (a connection, a server, a sandbox). Failures of your
    own code are not retried."""

    effects: ClassVar = declare(
        shared.ROLLS_OUT("group_size", "temperature", "top_p", "top_k"),
        shared.SAMPLES("max_tokens", "stop", "max_concurrent", "timeout_s", "max_turns", "max_episode_tokens"),
        shared.SAMPLES("max_tool_calls", "retries"),
        when.SEVERAL_TURNS("max_turns"),
        when.BELOW_ONE_REPLY("max_episode_tokens"),
        when.TOOLS("max_tool_calls"),
    )


Weights = Literal["float32", "bfloat16", "int8"]


class EngineSection(Section):
    """What generates tokens."""

    name: str = "torch"
    """A rollout engine: "torch"; "vllm" or "sglang", which sample on servers; or your own as "module:object". Backend
    "tinker" has "tinker"."""
    max_batch: int = Field(default=128, ge=1, le=65_536)
    """Sequences decoded together."""
    max_model_length: int | None = Field(default=None, ge=2, le=MOST_TOKENS)
    """Longest prompt plus response, in tokens; empty takes the model's own limit."""
    prefill_tokens: int = Field(default=8192, ge=1, le=MOST_TOKENS)
    """Prompt tokens computed at once."""
    kept_tokens: int = Field(default=16384, ge=0, le=MOST_TOKENS)
    """Tokens of finished replies whose keys and values stay cached for the next turn of their conversations. Caching
    starts when a first prompt continues a reply; run.deterministic turns it off."""
    health_every_s: float = Field(default=2.0, gt=0, le=LONGEST_S)
    """Seconds between two checks of the engine's health."""
    weights: Weights = "float32"
    """Precision of the weights that decode replies: that of the model, or rounded to fewer bits at each weight sync.
    Small weights are faster while few sequences are decoded. The loss must correct for the difference."""
    compile: bool = False
    """Compile the decoding step of the transformers forward pass (torch.compile; on CUDA with CUDA graphs). The first
    steps of each batch size and length take long, all others less."""
    cache_on_publish: Literal["keep", "recompute"] = "keep"
    """What a weight sync does to the keys and values of sequences in flight: keep those of the old weights, or
    recompute all."""
    threads: int = Field(default=0, ge=0, le=4096)
    """Threads of a separate engine. 0 takes half of the cores and leaves the others to the learner; with
    run.deterministic, it takes as many as the learner has."""

    urls: tuple[str, ...] = ()
    """Servers that run already, one per replica, such as "http://10.0.0.5:8000". Empty: Headrace starts its own."""
    replicas: int = Field(default=1, ge=1, le=4096)
    """Engines side by side, servers or processes of engine "torch"; Headrace starts, watches, restarts, ends them."""
    python: str | None = None
    """Interpreter of the environment that has the server's package; empty takes Headrace's own."""
    server_args: tuple[str, ...] = ()
    """Further arguments of the servers that Headrace starts, such as ["--tensor-parallel-size", "2"]."""
    server_env: dict[str, str] = {}
    """Further environment variables of these servers. "$NAME" is the value of a variable of Headrace's own."""
    gpus: tuple[str, ...] = ()
    """GPUs of each server that Headrace starts on this machine, as CUDA_VISIBLE_DEVICES has them: ["2", "3"] for two
    replicas, ["2,3", "4,5"] with two GPUs each. Empty: all servers see all GPUs."""
    api_key_env: str | None = None
    """Environment variable that holds the API key of the servers in engine.urls; empty for none."""
    transport: Literal["file", "gloo", "nccl", "ipc", "disk", "adapter"] | None = None
    """How weights travel to servers. Empty: "adapter" with LoRA; with GPUs "ipc" if colocated, otherwise "nccl"; else
    "file" on this machine, "gloo" to others."""
    sync_tolerance: float | None = Field(default=None, gt=0, le=100)
    """How far the log-probabilities of canary rows, which servers and learner score at every weight sync, may differ on
    average. Empty: by model.dtype."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """Seconds until a server must answer: one that Headrace starts, or one of engine.urls that does not answer yet."""
    hang_timeout_s: float = Field(default=300.0, gt=0, le=LONGEST_S)
    """Seconds that a server may take for a call other than sampling, or sample without a single token. Then it is taken
    for lost: it is started again, and its requests are issued again."""

    effects: ClassVar = declare(
        always("name", "max_model_length"),
        shared.SAMPLES("max_batch", "prefill_tokens", "kept_tokens", "weights", "compile", "threads", "health_every_s"),
        when.SEVERAL_ENGINES("replicas"),
        shared.ON_SERVERS("urls", "python", "server_args", "server_env", "gpus", "api_key_env", "transport"),
        shared.ON_SERVERS("sync_tolerance", "start_timeout_s", "hang_timeout_s"),
        when.STARTS_SERVERS("replicas", "python", "server_args", "server_env", "gpus"),
        when.SERVERS_HERE("gpus"),
        when.GIVEN_SERVERS("api_key_env"),
        when.NOT_ON_SERVERS("kept_tokens", "weights", "compile"),
        shared.NOT_TINKER("prefill_tokens", "kept_tokens", "weights", "compile", "threads"),
        when.NOT_DETERMINISTIC("kept_tokens"),
        when.TOGETHER("compile"),
        when.SEVERAL_TURNS("kept_tokens"),
        shared.AHEAD("cache_on_publish"),
        when.PARTIAL("cache_on_publish"),
        when.TINKER_SEGMENTS("cache_on_publish"),
        when.SEPARATE("threads"),
    )

    @property
    def servers(self) -> int:
        """How many servers sample, where servers do."""
        return len(self.urls) or self.replicas

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", url):
                raise ValueError(f'must be addresses such as "http://10.0.0.5:8000", got {url!r}')
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("names a server twice; each URL is a replica")
        return tuple(url.rstrip("/") for url in urls)
