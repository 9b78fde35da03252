"""The teacher of a distillation, asked through the service."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import tinker

from headrace.backends.local.teacher import Teacher
from headrace.backends.tinker.engine import score_row
from headrace.data.episode import Step
from headrace.errors import DataError, ModelError
from headrace.models.align import TokenBytes


class TinkerTeacher(Teacher):
    """Renders and aligns as the local teacher does; only the scores come from elsewhere."""

    def __init__(
        self, client: tinker.SamplingClient, tokenizer: Any, student_tokenizer: Any, student_ends: Collection[int]
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self._student = student_tokenizer
        self._student_ends = student_ends
        self._same_tokens = tokenizer.get_vocab() == student_tokenizer.get_vocab()
        if not self._same_tokens:
            self._student_bytes, self._own_bytes = TokenBytes(student_tokenizer), TokenBytes(tokenizer)
            if tokenizer.eos_token_id is None:
                raise ModelError("the teacher's tokenizer has no end-of-sequence token; use another distill.teacher")

    async def score(self, steps: Sequence[Step]) -> list[list[float]]:
        """For each step, the teacher's log-probability of every response token."""
        hot = next((step for step in steps if step.temperature != 1.0), None)
        if hot is not None:
            raise DataError(
                f"the service scores at temperature 1 only, and a step was sampled at {hot.temperature:g}; "
                f"set rollout.temperature = 1"
            )
        split = [self._row(step) for step in steps]
        scores = await asyncio.gather(*(score_row(self.client, [*prompt, *reply]) for prompt, reply in split))
        replies = [score[len(prompt) - 1 :] for score, (prompt, _) in zip(scores, split, strict=True)]
        if self._same_tokens:
            return replies
        return [self._aligned(step, split[i][1], replies[i]) for i, step in enumerate(steps)]
