"""Steps, schedule, checkpoints and alarms of training; and the assumptions of a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

import headrace.config.conditions.loop as when
from headrace.config.base import LONGEST_S, MOST_STEPS, MOST_TOKENS, Section, flatten
from headrace.config.conditions import shared
from headrace.config.effect import always, declare


class TrainerSection(Section):
    """Steps, batches, placement, staleness and checkpoints."""

    steps: int = Field(default=100, ge=1, le=MOST_STEPS)
    """Optimizer steps."""
    batch_size: int = Field(default=16, ge=1, le=65_536)
    """Tasks (groups) per batch."""
    updates_per_batch: int = Field(default=1, ge=1, le=65_536)
    """Optimizer steps on each batch, each on an equal share of its rows. Above 1, all but the first are off-policy, and
    the ratios and clips of the losses take effect."""
    placement: Literal["colocate", "separate"] = "colocate"
    """Where the engine runs: "colocate" shares device and weights with the learner; "separate" is another process, to
    which weights are synced."""
    max_staleness: int = Field(default=0, ge=0, le=1_000_000)
    """How many versions generation may run ahead of training; 0 is synchronous and on-policy. trainer.staleness decides
    about older tokens."""
    staleness: str = "trust"
    """Tokens older than max_staleness: "count" trains them, "drop" drops their group, "wait" prevents them by waiting
    for slow groups, "mask" leaves them out, "trust" leaves out those where the policy has moved; or "module:class"."""
    partial_rollouts: bool = True
    """Sequences in flight continue with the new weights after a weight sync; false waits until all have finished."""
    stream: bool | None = None
    """Compute gradients of the first complete groups of a step while the others are still generated. Empty: true if the
    engine is separate."""
    release_cache: bool | None = None
    """colocate: clear the engine's cache while the learner trains. Sequences in flight wait, and their cache is then
    computed again. Empty: true if none can be in flight (max_staleness 0)."""
    save_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Save a checkpoint every so many steps; 0 never (save_last still saves the last step)."""
    save_every_s: float = Field(default=600.0, ge=0, le=1e9)
    """Also save a checkpoint when so many seconds have passed since the last one; 0 never. It limits the work that a
    kill loses, and changes no result."""
    save_last: bool = True
    """Save a checkpoint after the last step."""
    keep_last: int = Field(default=2, ge=1, le=1_000_000)
    """How many of the newest checkpoints are kept: those of save_every first, and always the newest of all."""
    keep_best: int = Field(default=0, ge=0, le=1_000_000)
    """How many more checkpoints are kept: those with the best evaluation by best_metric."""
    best_metric: str | None = None
    """The metric of keep_best, such as "eval/NAME/pass@1"; higher is better. Empty: pass@1 of the only set."""
    save_async: bool | None = None
    """Copy the state, which takes memory, and write the copy while training continues. Empty: if the backend can."""
    callbacks: tuple[str, ...] = ()
    """"module:class" of your own Callbacks, called at every step, weight sync and evaluation."""
    hook_timeout_s: float = Field(default=3600.0, gt=0, le=LONGEST_S)
    """Time limit of one call of your code that has no other limit: a callback, a grouping hook, an estimator, an
    evaluation metric, `start` of a workflow. A call that exceeds it ends the run."""

    effects: ClassVar = declare(
        always("steps", "batch_size", "updates_per_batch", "stream", "callbacks", "hook_timeout_s"),
        always("save_every", "save_every_s", "save_last", "keep_best"),
        shared.NOT_TINKER("placement", "release_cache"),
        shared.SAMPLES("placement"),
        shared.ROLLS_OUT("max_staleness"),
        shared.AHEAD("staleness", "partial_rollouts"),
        when.CACHE_SHARED("release_cache"),
        when.SAVES_ON_THE_WAY("keep_last"),
        when.KEEPS_BEST("best_metric"),
        when.COPIES("save_async"),
    )


class ProduceSection(Section):
    """How many groups are started, and which are trained first."""

    over_sample: float | None = Field(default=None, ge=0, le=1_000_000)
    """Extra groups that a step starts, as a share of those that it needs. The first complete groups are trained, the
    others continue. Empty: as many as trainer.max_staleness allows."""
    order: Literal["fifo", "oldest_version", "newest"] = "fifo"
    """Which complete groups are trained first: the first to complete, those with the oldest tokens, or the last to
    complete."""
    capacity: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Most groups that may run or wait at once. Empty: twice as many as max_staleness lets run ahead."""
    reuse: int = Field(default=1, ge=1, le=65_536)
    """Train each group up to so many times; the loss must have a ratio, which corrects for the newer policy."""
    spill_above_mb: float = Field(default=1024.0, gt=0, le=1e9)
    """Memory for complete groups that wait to be trained; further ones wait on disk."""

    effects: ClassVar = declare(always("reuse", "spill_above_mb"), shared.AHEAD("over_sample", "order", "capacity"))


class AlarmSection(Section):
    """Limits on the difference between the log-probabilities of learner and sampler at the same version."""

    warn_drift: float = Field(default=0.02, gt=0, le=1000)
    """Mean absolute difference above which the run warns."""
    stop_drift: float = Field(default=0.5, gt=0, le=1000)
    """Mean absolute difference above which the run ends: the engine does not have the weights it should have."""

    effects: ClassVar = declare(
        shared.ROLLS_OUT("warn_drift", "stop_drift"), when.SAMPLES_AS_LEARNED("warn_drift", "stop_drift")
    )


class DriftSection(Section):
    """How far a simulated policy moves.

    The log-probability of a token changes by a normal number. Its standard deviation is the task's factor times sigma
    times age to the power `power`.
    """

    sigma: float = Field(default=0.05, ge=0, le=1000)
    """Standard deviation of the change of a token's log-probability after one version."""
    power: float = Field(default=0.5, ge=0, le=1)
    """How it grows with age: 0.5 is a random walk, 1 a steady drift."""
    spread: float = Field(default=0.5, ge=0, le=100)
    """The policy moves more on some tasks than on others: a task's factor is lognormal, with this standard deviation of
    its logarithm."""
    noise: float = Field(default=0.0, ge=0, le=1000)
    """Standard deviation of the difference between sampler and learner at the same version, from rounding."""

    effects: ClassVar = declare(
        shared.AHEAD("sigma", "power", "spread", "noise"), when.MEASURES_DRIFT("sigma", "power", "spread", "noise")
    )


class FleetSection(Section):
    """The machines of a simulated run: how many, how often they are lost, how weights reach them, what they cost."""

    engines: int = Field(default=1, ge=1, le=1_000_000)
    """Engine replicas, which share rollout.max_concurrent; each on a node of its own."""
    learners: int = Field(default=1, ge=1, le=1_000_000)
    """Nodes of the learner. The loss of one stops it."""
    mtbf_h: float = Field(default=0.0, ge=0, le=1e9)
    """Mean hours between two losses of one node; 0: none is lost."""
    recovery_s: float = Field(default=300.0, gt=0, le=LONGEST_S)
    """Seconds until a lost node is replaced. The groups of a lost engine begin again on others; after the loss of a
    learner, the steps since the last checkpoint (trainer.save_every, save_every_s) are repeated from the record."""
    weights_gb: float = Field(default=0.0, ge=0, le=1e6)
    """Size of the weights that each sync sends; 0 takes syncs as part of simulate.learn_s."""
    transport: Literal["direct", "tree", "file"] = "direct"
    """How they travel: the learner sends them to every engine, engines pass them on to each other, or they are written
    to a shared file system that all engines read."""
    bandwidth_gbps: float = Field(default=100.0, gt=0, le=1e6)
    """Gigabits per second of each node's network."""
    storage_gbps: float = Field(default=200.0, gt=0, le=1e6)
    """Gigabits per second of the shared file system, for all readers together."""
    sent_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the weights that a sync sends; below 1 for a delta sync."""
    engine_price: float = Field(default=0.0, ge=0, le=1e6)
    """Price of an engine node per hour."""
    learner_price: float = Field(default=0.0, ge=0, le=1e6)
    """Price of a learner node per hour."""

    effects: ClassVar = declare(
        when.GIVEN_SLOTS("engines", "mtbf_h"),
        always("learners", "weights_gb", "engine_price", "learner_price"),
        when.NODES_ARE_LOST("recovery_s"),
        when.SYNC_COSTS("transport", "bandwidth_gbps", "sent_share"),
        when.SYNC_BY_FILE("storage_gbps"),
    )


class SimulateSection(Section):
    """What `headrace simulate` assumes, and which settings it compares."""

    from_run: Path | None = None
    """Folder of a run whose measured durations (and shares of failed and filtered work) are used; empty uses those
    below."""
    group_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """Median seconds from the start of a group until it is complete."""
    group_spread: float = Field(default=0.3, ge=0, le=100)
    """Spread of these seconds: the standard deviation of their logarithm."""
    slow_share: float = Field(default=0.0, ge=0, le=1)
    """Share of tasks that are slow."""
    slow_factor: float = Field(default=10.0, ge=1, le=1e6)
    """How many times longer slow tasks take."""
    learn_s: float = Field(default=5.0, gt=0, le=LONGEST_S)
    """Seconds of one training step, including its weight sync."""
    failed_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of episodes that fail."""
    filtered_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of groups with uniform rewards, which filters.drop_uniform drops."""
    tokens: int = Field(default=32, ge=1, le=MOST_TOKENS)
    """Tokens of a simulated episode."""
    token_place: float = Field(default=0.5, ge=0, le=1)
    """When a group's tokens are sampled within its duration, on average: 0.5 spreads them evenly; below 0.5 the group
    waits after them (for tools, for a judge), above 0.5 before."""
    slow_token_place: float | None = Field(default=None, ge=0, le=1)
    """The same for slow tasks; empty takes token_place."""
    steps: int = Field(default=500, ge=1, le=MOST_STEPS)
    """Training steps that are simulated."""
    warmup: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """First steps that the results leave out; empty for a quarter of all steps."""
    grid: dict[str, tuple[Any, ...]] = {}
    """Settings to compare: a key of the run file and its values. Every combination is simulated."""
    drift: DriftSection = DriftSection()
    """How far the policy moves, for staleness policies that measure it."""
    fleet: FleetSection = FleetSection()
    """The machines, their losses, weight syncs and prices."""

    effects: ClassVar = declare(
        always("from_run", "steps", "warmup", "grid"),
        when.GIVEN_DURATIONS("group_s", "group_spread", "slow_share", "slow_factor", "learn_s", "failed_share"),
        when.GIVEN_DURATIONS("filtered_share", "token_place", "slow_token_place"),
        always("tokens"),
        when.SLOW_TASKS("slow_factor", "slow_token_place"),
        when.DROPS_UNIFORM("filtered_share"),
    )

    @field_validator("grid", mode="before")
    @classmethod
    def _flatten(cls, grid: Any) -> Any:
        """`trainer.max_staleness = [...]` without quotes is a table in a table to TOML; it means the same here."""
        return dict(flatten(grid)) if isinstance(grid, dict) else grid
