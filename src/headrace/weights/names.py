"""What weights are called on servers."""

from __future__ import annotations


def adapter_name(version: int) -> str:
    """Under which servers serve the adapters of a version."""
    return f"policy-v{version}"
