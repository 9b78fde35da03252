"""Where tasks come from, for training and for evaluation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

import headrace.config.conditions.data as when
from headrace.config.base import MOST_STEPS, MOST_TOKENS, Section
from headrace.config.conditions import shared
from headrace.config.effect import Effects, always, declare

_TASK_FIELDS = ("id", "messages", "instruction", "answer", "source", "metadata")


class SourceSection(Section):
    """One source of tasks, and how its rows become tasks."""

    tasks: str
    """A registered source, a .jsonl or .parquet file, a folder of a saved Hugging Face dataset, "hf:NAME",
    "reasoning_gym:FAMILY", or "module:function" of your own that returns tasks."""
    args: dict[str, Any] = {}
    """Keyword arguments of the source."""
    columns: dict[str, str] = {}
    """The column of each task field, such as { instruction = "question" }; a dot leads into a nested column. A field
    that is not named here is read from the column of the same name."""
    template: str | None = None
    """The instruction, made of columns: "{question}\\nAnswer:"."""
    keep_columns: bool = False
    """Put all other columns into the task's metadata."""
    system: str | None = None
    """System prompt put before tasks that have none; empty takes data.system."""

    effects: ClassVar[Effects] = declare(
        always("tasks", "args", "columns", "template", "system"), when.ROWS("keep_columns")
    )

    @field_validator("columns")
    @classmethod
    def _are_fields(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(columns) - set(_TASK_FIELDS))
        if unknown:
            raise ValueError(f"a task has no field {', '.join(unknown)}; its fields are {', '.join(_TASK_FIELDS)}")
        return columns

    @model_validator(mode="after")
    def _one_instruction(self) -> Self:
        clash = [name for name in ("instruction", "messages") if name in self.columns]
        if self.template is not None and clash:
            raise ValueError(f"template and columns.{clash[0]} both say what the model is asked; remove one")
        return self


class MixtureSection(SourceSection):
    """One source of a mixture."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the tasks drawn, relative to the other sources' weights."""

    effects: ClassVar = declare(SourceSection.effects, when.SEVERAL_SOURCES("weight"))


class CurriculumSection(Section):
    """Draws tasks more often whose success rate is near a target."""

    target: float | None = Field(default=None, ge=0, le=1)
    """Success rate whose tasks are drawn most; empty draws all tasks equally often."""
    by: str = "task"
    """Whose success rate: each "task", each "source", or all tasks with the same "metadata.NAME"."""
    least: float = Field(default=0.1, gt=0, le=1)
    """How often tasks furthest from the target are drawn, relative to tasks at the target."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """Weight of the old rate when a group updates it; 0 uses the newest group alone."""

    effects: ClassVar = declare(
        shared.ROLLS_OUT("target", "by", "least", "memory"), when.CURRICULUM("by", "least", "memory")
    )


class DataSection(SourceSection):
    """Where training tasks come from."""

    tasks: str = "countdown"
    """A registered source, a .jsonl or .parquet file, a folder of a saved Hugging Face dataset, "hf:NAME",
    "reasoning_gym:FAMILY", or "module:function" of your own that returns tasks."""
    system: str | None = None
    """System prompt put before tasks that have none, in evaluation too."""
    mixture: dict[str, MixtureSection] = {}
    """Several sources by name, drawn by weight, in place of data.tasks."""
    curriculum: CurriculumSection = CurriculumSection()
    """Draw tasks more often whose success rate is near a target."""
    holdout: int | float = Field(default=0, ge=0, le=1_000_000_000)
    """Tasks held out from training, as a share (0.1) or a number (200), for an evaluation set with tasks = "holdout".
    The split is by question: the same question is never on both sides."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """Rows that are not valid tasks, also in evaluation sets: "stop" is an error, "skip" leaves them out and warns."""
    on_overlap: Literal["warn", "stop", "ignore"] = "warn"
    """What happens if an evaluation set has questions that are also trained."""
    shuffle: bool = True
    """Shuffle each epoch by (seed, epoch); false keeps the order of the source."""
    drop_last: bool = True
    """Drop the last, short batch of an epoch. false trains it short or, above max_staleness 0, fills it from the next
    epoch."""

    effects: ClassVar = declare(
        always("system", "holdout", "shuffle"),
        when.SOURCE_NOT_MIXED("tasks", "args", "columns", "template", "keep_columns"),
        when.ROWS("keep_columns"),
        when.BAD_ROWS("on_bad_row"),
        when.HAS_SETS("on_overlap"),
        when.NO_CURRICULUM("drop_last"),
    )

    @field_validator("holdout")
    @classmethod
    def _is_share_or_number(cls, holdout: int | float) -> int | float:
        if isinstance(holdout, float) and holdout >= 1:
            raise ValueError(f"a share is below 1 (0.1), a number of tasks has no point (200), got {holdout}")
        return holdout


class EvalSet(SourceSection):
    """One evaluation set."""

    tasks: str
    """The same as data.tasks, or "holdout": what data.holdout keeps from training (args = { count = N } takes N)."""
    attempts: int = Field(default=1, ge=1, le=65_536)
    """Rollouts of each task; pass@k and avg@k are reported up to this k."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the full distribution."""
    max_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Most tokens of a reply; empty takes rollout.max_tokens."""
    limit: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Use only the first so many tasks; empty uses all."""
    workflow: str | None = None
    """A workflow of its own; empty takes the run's."""
    workflow_args: dict[str, Any] = {}
    """Keyword arguments of its own workflow."""
    judger: str | None = None
    """A judger of its own; empty takes the run's."""
    judger_args: dict[str, Any] = {}
    """Keyword arguments of its own judger."""

    effects: ClassVar = declare(
        always("args", "temperature", "max_tokens", "limit", "workflow", "judger"),
        when.EVALUATED("tasks"),
        when.OWN_TASKS("columns", "template", "keep_columns", "system"),
        when.ROWS("keep_columns"),
        when.ATTEMPTS_DIFFER("attempts"),
        when.WARM("top_p"),
        when.OWN_WORKFLOW("workflow_args"),
        when.OWN_JUDGER("judger_args"),
    )


class EvalSection(Section):
    """When and on what the policy is evaluated."""

    every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Evaluate every so many steps; 0 only before and after."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    sets: dict[Annotated[str, Field(pattern=r"^[^/]*[^/\s][^/]*$")], EvalSet] = {}
    """Evaluation sets by name."""
    metrics: tuple[str, ...] = ()
    """"module:function" of your own, from the episodes of a set (a list per task) to {name: number}."""

    effects: ClassVar = when.HAS_SETS("every", "before", "after", "metrics")
