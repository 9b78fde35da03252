"""Small checks of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tinker import types

from headrace.tinker_server.checkpoint_store import check_name
from headrace.tinker_server.options import Refusal

_SHORTEST_TTL_S = 3600
_LONGEST_TTL_S = 10 * 365 * 24 * 3600


def digest(raw: bytes) -> str:
    """A digest of a request. Two requests of one number must have the same."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata as the API gives them back."""
    return None if metadata is None else {str(key): str(value) for key, value in metadata.items()}


def known_run(model_id: str) -> str:
    """A name that a run can have; one that none has, if this is none."""
    with suppress(Refusal):
        return check_name(model_id, "a run")
    return "-"


def check_ttl(ttl_s: int | None, shortest: int = _SHORTEST_TTL_S) -> None:
    """Refuse a time to live that is too short, or longer than a date can express."""
    if ttl_s is not None and not shortest <= ttl_s <= _LONGEST_TTL_S:
        raise Refusal(
            f"ttl_seconds must be between {shortest} and {_LONGEST_TTL_S}, got {str(ttl_s)[:40]}; "
            "leave it out, or give null, to keep the checkpoint for good"
        )


def check_adam(params: types.AdamParams) -> None:
    """Refuse parameters that would spoil the model."""
    sound = {
        "learning_rate": 0 <= params.learning_rate < 1e6,
        "beta1": 0 <= params.beta1 < 1,
        "beta2": 0 <= params.beta2 < 1,
        "eps": 0 <= params.eps < 1e6,
        "weight_decay": 0 <= params.weight_decay < 1e6,
        "grad_clip_norm": 0 <= params.grad_clip_norm < float("inf"),
    }
    for name, fits in sound.items():
        if not fits:
            raise Refusal(f"{name} is out of range: {getattr(params, name)}")
