"""Do a file's tensors fit the architecture? What is missing would be random numbers, and nobody would know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ModelError

_SHOWN = 3
_REMEDY = "use the config.json that belongs to the weights, or copy or save the model again"


def require_fit(what: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise ModelError unless the file gave every tensor of the model, in its shape, and nothing else.

    `info` is what transformers found out: tied tensors are no gap in it, nor are keys that its classes know as
    harmless (old rotary tables, heads that generation does not use).
    """
    missing, extra = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    problems = [
        _listed("missing, and would be random numbers", [f"{key}{_near(key, extra)}" for key in missing]),
        _listed("not of this architecture", [f"{key}{_near(key, missing)}" for key in extra]),
        _listed("of another shape", [_shapes(*found) for found in sorted(info["mismatched_keys"])]),
        _listed("unreadable", [str(text).strip() for text in info.get("error_msgs") or ()]),
    ]
    if found := "; ".join(filter(None, problems)):
        raise ModelError(f"{what}: its tensors are not those of {type(model).__name__}: {found}; {_REMEDY}")
    _require_tied(what, model)
    _require_finite(what, model)


def names_that_differ(found: Collection[str], wanted: Collection[str]) -> str:
    """Which names are missing among those found, and which are too many; empty if they are the same."""
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    problems = [
        _listed("missing", [f"{key}{_near(key, extra)}" for key in missing]),
        _listed("too many", [f"{key}{_near(key, missing)}" for key in extra]),
    ]
    return "; ".join(filter(None, problems))


def _require_tied(what: str, model: Any) -> None:
    """A configuration that ties input and output embedding, beside a file that has two, loses one when it is saved."""
    given, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and None not in (given, output) and given.weight is not output.weight:
        raise ModelError(
            f"{what}: config.json says tie_word_embeddings, and the file has an output embedding that differs from the "
            f"input embedding; set tie_word_embeddings to false if that is meant, or copy or save the model again"
        )


def _require_finite(what: str, model: Any) -> None:
    """Weights that are no numbers make every loss none; here it can still be said which they are."""
    bad = [name for name, weight in model.named_parameters() if weight.is_floating_point() and not _is_finite(weight)]
    if found := _listed("not finite (NaN or infinite)", bad):
        raise ModelError(f"{what}: of its weights, {found}; copy or save the model again")


def _is_finite(weight: Tensor) -> bool:
    if not weight.numel() or weight.device.type == "meta":
        return True
    low, high = torch.aminmax(weight.detach())  # one pass without a copy; NaN goes through
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _listed(what: str, items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{len(items)} {what}: {', '.join(items[:_SHOWN])}{more}" if items else ""


def _near(key: str, others: Iterable[str]) -> str:
    found = get_close_matches(key, list(others)[:2000], n=1, cutoff=0.8)
    return f' (near "{found[0]}")' if found else ""


def _shapes(key: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{key} has {list(found)} where {list(wanted)} is wanted"
