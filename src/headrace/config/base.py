"""What all sections have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from headrace.config.effect import Effects

MOST_STEPS = 100_000_000
"""Beyond these a setting is a slip of the hand: it would overflow or fill the memory before it is of use."""
MOST_TOKENS = 100_000_000
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
        annotation = cls.model_fields[info.field_name or ""].annotation
        wanted = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and wanted & {int, float} and bool not in wanted:
            raise ValueError(f"must be a number, got {str(value).lower()}")
        if bool in wanted and isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {value}")
        return value


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, under their keys joined by dots."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
