"""Byte alignment of two tokenisations of one text, for teachers with a tokenizer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from headrace.errors import ModelError

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""What a teacher reads in place of bytes that are no text."""


def align_logprobs(
    student_tokens: Sequence[bytes],
    student_logprobs: Sequence[float],
    teacher_tokens: Sequence[bytes],
    teacher_logprobs: Sequence[float],
) -> list[float]:
    """The teacher's log-probability for each student token; tokens are given as the bytes that they stand for.

    Between two boundaries that both tokenisations share lies a span of text. What the teacher gives the span more or
    less than the student is shared evenly by the student's tokens in it: the sum over a span is exact. Where the two
    texts differ, because the teacher's tokenizer normalises or read a torn character as U+FFFD, there is no shared
    boundary: the difference lies inside a span.
    """
    aligned: list[float] = []
    for (student_from, teacher_from), (student_to, teacher_to) in pairwise(
        _shared_boundaries(student_tokens, teacher_tokens)
    ):
        mine = student_logprobs[student_from:student_to]
        gap = sum(teacher_logprobs[teacher_from:teacher_to]) - sum(mine)
        aligned += [logprob + gap / len(mine) for logprob in mine]
    return aligned


def _shared_boundaries(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[tuple[int, int]]:
    """How many tokens of each lie before every boundary that both share, from (0, 0) to all of them."""
    if bool(student) != bool(teacher):
        raise ModelError(
            f"the student's reply has {len(student)} tokens, and to the teacher's tokenizer it has {len(teacher)}; "
            f"use a teacher that can read it"
        )
    ours, theirs = b"".join(student), b"".join(teacher)
    student_at = {end: count for count, end in enumerate(accumulate(map(len, student)), 1)}
    teacher_at = {end: count for count, end in enumerate(accumulate(map(len, teacher)), 1)}
    last = (len(student), len(teacher))
    found = [(0, 0)]
    for our_start, their_start, size in _agreements(ours, theirs):
        for offset in range(size + 1):
            pair = student_at.get(our_start + offset, 0), teacher_at.get(their_start + offset, 0)
            # every span needs a token of each: what one of them has alone goes with its neighbour
            if found[-1][0] < pair[0] < last[0] and found[-1][1] < pair[1] < last[1]:
                found.append(pair)
    return [*found, last] if student else found


def _agreements(ours: bytes, theirs: bytes) -> list[tuple[int, int, int]]:
    """(start in ours, start in theirs, length) of the stretches in which two texts agree, in order."""
    # nearly always the whole text: what the slow comparison is left with is short
    head = _common_start(ours, theirs)
    tail = _common_start(ours[head:][::-1], theirs[head:][::-1])
    our_end, their_end = len(ours) - tail, len(theirs) - tail
    middle = SequenceMatcher(None, ours[head:our_end], theirs[head:their_end], autojunk=False).get_matching_blocks()
    return [(0, 0, head), *((a + head, b + head, size) for a, b, size in middle), (our_end, their_end, tail)]


def _common_start(one: bytes, two: bytes) -> int:
    differ = (place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return next(differ, min(len(one), len(two)))


class TokenBytes:
    """The bytes that each token of a tokenizer stands for. A special token is read as it is written."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._as_written = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        # byte-level tokenizers write a space, and every other byte that cannot be seen, as a letter of their own
        self._byte_level = "▁" not in tokenizer.get_vocab()

    def __call__(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # a model may have more rows than its tokenizer has tokens
            return UNREADABLE.encode()
        if token_id in self._as_written:
            return self._as_written[token_id].encode()
        if self._byte_level:
            table = _byte_of_character()
            known = all(character in table for character in token)
            return bytes(table[character] for character in token) if known else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """The printable stand-ins that byte-level tokenizers write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
