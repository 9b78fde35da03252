"""Byte alignment of two tokenisations of one text, for teachers with a tokenizer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from headrace.errors import ModelError


def align_logprobs(
    student_sizes: Sequence[int],
    student_logprobs: Sequence[float],
    teacher_sizes: Sequence[int],
    teacher_logprobs: Sequence[float],
) -> list[float]:
    """The teacher's log-probability for each student token; sizes are in bytes.

    Between two boundaries that both tokenisations share lies a span of text. What the teacher gives the span more or
    less than the student is shared evenly by the student's tokens in it: the sum over a span is exact.
    """
    if sum(student_sizes) != sum(teacher_sizes):
        raise ModelError(
            f"the student's tokens cover {sum(student_sizes)} bytes, the teacher's {sum(teacher_sizes)}: not one text"
        )
    student_ends, teacher_ends = list(accumulate(student_sizes)), list(accumulate(teacher_sizes))
    shared = sorted(set(student_ends) & set(teacher_ends))
    aligned: list[float] = []
    teacher_from = 0
    for end in shared:
        student_to = _count_upto(student_ends, end, len(aligned))
        teacher_to = _count_upto(teacher_ends, end, teacher_from)
        mine = student_logprobs[len(aligned) : student_to]
        gap = sum(teacher_logprobs[teacher_from:teacher_to]) - sum(mine)
        aligned += [logprob + gap / len(mine) for logprob in mine]
        teacher_from = teacher_to
    return aligned


def _count_upto(ends: Sequence[int], end: int, start: int) -> int:
    """How many tokens end at or before `end`; empty tokens right after it belong to it too."""
    while start < len(ends) and ends[start] <= end:
        start += 1
    return start


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that a token stands for; none for a special token."""
    if token_id in tokenizer.all_special_ids:
        return b""
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token.startswith("<0x") and token.endswith(">") and len(token) == 6:
        return bytes([int(token[3:5], 16)])
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.replace("▁", " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
