"""Compares mathematical answers with math-verify. Runs in worker processes only: nothing here can be interrupted."""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that time limits are left to the caller, here


def _parsed(text: str, boxed: bool) -> list:
    forms = [f"\\boxed{{{text}}}", f"${text}$", text] if boxed else [text]
    for form in forms:
        # no time limit of its own: that one works by signals, and the pool has its own
        found = parse(form, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]
        if found:
            return found
    return []


def readable(gold: str) -> bool:
    """Whether an expected answer can be read at all."""
    return bool(_parsed(gold, True))


def compare(golds: list[str], answer: str, boxed: bool) -> str:
    """ "right", "wrong", "unreadable" (the answer), or "gold" if none of the expected answers can be read."""
    read = [found for gold in golds if (found := _parsed(gold, True))]
    if not read:
        return "gold"
    given = _parsed(answer, boxed)
    if not given:
        return "unreadable"
    return "right" if any(verify(gold, given, timeout_seconds=None) for gold in read) else "wrong"


def serve(task: str, *arguments) -> str | bool:  # type: ignore[no-untyped-def]
    """What a worker is asked."""
    return compare(*arguments) if task == "compare" else readable(*arguments)
