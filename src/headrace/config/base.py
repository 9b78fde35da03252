"""What all sections have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from headrace.config.effect import Effects

MOST_STEPS = 100_000_000
"""Beyond these a setting is a slip of the hand: it would overflow or fill the memory before it is of use."""
MOST_TOKENS = 100_000_000
LEAST = 1e-30
"""A number this close to 0 is 0 in the arithmetic of models, and would have no effect."""
LEAST_TEMPERATURE = 1e-4
"""Below it, logits that are divided by it have no exact digits left; 0 is greedy."""
LONGEST_S = 100_000_000  # three years; the clocks of locks and sockets overflow further up


class Section(BaseModel):
    """Base of every section of a run file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    effects: ClassVar[Effects] = {}
    """When each field has effect. Fields that are sections, or tables of them, are left to these."""

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """true is no number and 1 is no truth value: pydantic would take either for the other."""
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy's, whose truth values are no bool
            value = value.item()
        annotation = cls.model_fields[info.field_name or ""].annotation
        wanted = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and wanted & {int, float} and bool not in wanted:
            raise ValueError(f"must be a number, got {str(value).lower()}")
        if bool in wanted and isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {value}")
        if isinstance(value, float) and 0 < abs(value) < LEAST:
            raise ValueError(f"is too close to 0 to have an effect, got {value:g}")
        return value


def _samplable(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, got {temperature:g}")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_samplable)]


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, under their keys joined by dots."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
