"""How rollouts and learning go on beside each other, and what a simulation of it assumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

import headrace.config.conditions as when
from headrace.config.base import LONGEST_S, MOST_STEPS, MOST_TOKENS, Section, flatten
from headrace.config.effect import always, declare


class TrainerSection(Section):
    """The loop."""

    steps: int = Field(default=100, ge=1, le=MOST_STEPS)
    """Optimizer steps."""
    batch_size: int = Field(default=16, ge=1, le=65_536)
    """Tasks (groups) per batch."""
    updates_per_batch: int = Field(default=1, ge=1, le=65_536)
    """Optimizer steps on each batch, each on an equal share of its rows. Above 1 all but the first are off-policy, and
    the losses' ratios and clips come into play."""
    placement: Literal["colocate", "separate"] = "colocate"
    """Where the engine runs: "colocate" shares device and weights with the learner; "separate" is a process of its own
    that receives weights."""
    max_staleness: int = Field(default=0, ge=0, le=1_000_000)
    """How many versions generation may run ahead of training; 0 is on-policy. What happens to work that has grown older
    is up to trainer.staleness."""
    staleness: str = "trust"
    """What is done about work older than max_staleness: "count" (nothing), "drop", "wait", "mask", "trust" (train what
    has not diverged), or "module:class"."""
    partial_rollouts: bool = True
    """Sequences in flight when new weights come carry on under them; false lets all of them finish first."""
    stream: bool | None = None
    """Start learning on the first whole groups of a step while the others are still generated. Empty: where the engine
    is separate."""
    release_cache: bool | None = None
    """colocate: free the engine's cache while learning. Sequences in flight wait, and are computed again afterwards.
    Empty: where none can be in flight (max_staleness 0)."""
    save_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Checkpoint every so many steps; 0 never (the last step is still saved when save_last is true)."""
    save_every_s: float = Field(default=600.0, ge=0, le=1e9)
    """Checkpoint, too, when so many seconds have passed since the last one; 0 never. It bounds what a kill costs, and
    changes no result."""
    save_last: bool = True
    """Checkpoint after the last step."""
    keep_last: int = Field(default=2, ge=1, le=1_000_000)
    """Newest checkpoints kept; those of save_every come first, and the newest of all is kept beside them."""
    keep_best: int = Field(default=0, ge=0, le=1_000_000)
    """Checkpoints kept beside those: the ones whose evaluation was best by best_metric."""
    best_metric: str | None = None
    """What keep_best goes by, such as "eval/NAME/pass@1"; the higher the better. Empty: pass@1 of the only set."""
    save_async: bool | None = None
    """Copy the state, which takes memory, and write the copy while training goes on. Empty: where the backend can."""
    callbacks: tuple[str, ...] = ()
    """"module:class" of your own Callbacks, told of every step, publication and evaluation."""
    hook_timeout_s: float = Field(default=3600.0, gt=0, le=LONGEST_S)
    """Longest duration of one call of your code that no other time limit covers: a callback, a grouping hook, an
    estimator, an evaluation metric, `start` of a workflow. Over it, the run ends."""

    effects: ClassVar = declare(
        always("steps", "batch_size", "updates_per_batch", "stream", "callbacks", "hook_timeout_s"),
        always("save_every", "save_every_s", "save_last", "keep_best"),
        when.NOT_TINKER("placement", "release_cache"),
        when.SAMPLES("placement"),
        when.ROLLS_OUT("max_staleness"),
        when.AHEAD("staleness", "partial_rollouts"),
        when.CACHE_SHARED("release_cache"),
        when.SAVES_ON_THE_WAY("keep_last"),
        when.KEEPS_BEST("best_metric"),
        when.COPIES("save_async"),
    )


class ProduceSection(Section):
    """How rollouts are started and handed to the learner."""

    over_sample: float | None = Field(default=None, ge=0, le=1_000_000)
    """Groups started beyond those that a step needs, as a share of them: the first whole ones are trained, the others
    carry on. Empty: as many as trainer.max_staleness allows."""
    order: Literal["fifo", "oldest_version", "newest"] = "fifo"
    """Which whole groups are trained first: those that became whole first, those with the oldest tokens, or those that
    became whole last."""
    capacity: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Most groups that run or wait to be trained at once. Empty: twice what max_staleness lets run ahead."""
    reuse: int = Field(default=1, ge=1, le=65_536)
    """Train each group up to so many times; losses with a ratio correct for what has changed since."""
    spill_above_mb: float = Field(default=1024.0, gt=0, le=1e9)
    """Whole groups that wait to be trained are kept on disk beyond so much memory."""

    effects: ClassVar = declare(always("reuse", "spill_above_mb"), when.AHEAD("over_sample", "order", "capacity"))


class AlarmSection(Section):
    """What happens when the learner's log-probabilities differ from those that the same version sampled with."""

    warn_drift: float = Field(default=0.02, gt=0, le=1000)
    """Mean absolute difference above which a warning is given."""
    stop_drift: float = Field(default=0.5, gt=0, le=1000)
    """Mean absolute difference above which the run ends: the engine does not have the weights it should have."""

    effects: ClassVar = declare(
        when.ROLLS_OUT("warn_drift", "stop_drift"), when.SAMPLES_AS_LEARNED("warn_drift", "stop_drift")
    )


class DriftSection(Section):
    """How far a simulated policy moves. A token's log-probability changes by a normal number whose standard deviation
    is the task's factor times sigma times age to the power `power`."""

    sigma: float = Field(default=0.05, ge=0, le=1000)
    """Standard deviation of the change of a token's log-probability after one version."""
    power: float = Field(default=0.5, ge=0, le=1)
    """How it grows with age: 0.5 is a random walk, 1 a steady drift."""
    spread: float = Field(default=0.5, ge=0, le=100)
    """The policy moves more on some tasks than on others: a task's factor is lognormal, with this standard deviation of
    its logarithm."""
    noise: float = Field(default=0.0, ge=0, le=1000)
    """Standard deviation of what sampler and learner differ by at the same version, from rounding."""

    effects: ClassVar = declare(
        when.AHEAD("sigma", "power", "spread", "noise"), when.MEASURES_DRIFT("sigma", "power", "spread", "noise")
    )


class SimulateSection(Section):
    """What `headrace simulate` assumes, and which settings it compares."""

    from_run: Path | None = None
    """Folder of a run whose durations (and shares of failed and filtered work) are taken; empty takes those below."""
    group_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """Median seconds from the start of a group until it is whole."""
    group_spread: float = Field(default=0.3, ge=0, le=100)
    """How they vary: standard deviation of their logarithm."""
    slow_share: float = Field(default=0.0, ge=0, le=1)
    """Share of tasks that are slow."""
    slow_factor: float = Field(default=10.0, ge=1, le=1e6)
    """How many times longer slow tasks take."""
    learn_s: float = Field(default=5.0, gt=0, le=LONGEST_S)
    """Seconds of one training step, with the publication of its weights."""
    failed_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of episodes that fail."""
    filtered_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of groups with uniform rewards, which filters.drop_uniform drops."""
    tokens: int = Field(default=32, ge=1, le=MOST_TOKENS)
    """Tokens of a simulated episode."""
    token_place: float = Field(default=0.5, ge=0, le=1)
    """Where in the duration of a group its tokens are sampled, on average: 0.5 spreads them evenly over it; less means
    that it waits (for tools, for a judge) after them, more that it waits before."""
    slow_token_place: float | None = Field(default=None, ge=0, le=1)
    """The same for slow tasks; empty takes token_place."""
    steps: int = Field(default=500, ge=1, le=MOST_STEPS)
    """Training steps that are simulated."""
    warmup: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """First steps that do not count in the figures; empty for a quarter of them."""
    grid: dict[str, tuple[Any, ...]] = {}
    """Settings to compare: a key of the run file and its values. Every combination is simulated."""
    drift: DriftSection = DriftSection()
    """How far the policy moves, for policies that measure it."""

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
