"""The teacher of a distillation: reads the student's prompt, or a privileged one, and scores what the student said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.backends.local.frozen import FrozenModel, score_rows
from headrace.config import RunConfig
from headrace.data.episode import Step
from headrace.data.task import Message
from headrace.errors import BackendError
from headrace.models.align import align_logprobs, token_bytes


class Teacher(FrozenModel):
    """One teacher for the whole run. With a tokenizer of its own, its scores are aligned by bytes."""

    def __init__(self, config: RunConfig, student_tokenizer: Any) -> None:
        name = config.distill.teacher
        section = config.model
        if name != "initial":
            section = section.model_copy(update={"name": name, "lora": section.lora.model_copy(update={"rank": 0})})
        super().__init__(section)
        self._limits = (config.backend.micro_batch_tokens, config.backend.logits_chunk)
        self._student = student_tokenizer
        self._same_tokens = self.tokenizer.get_vocab() == student_tokenizer.get_vocab()

    def logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        """For each step, the teacher's log-probability of every response token."""
        rows = [self._row(step) for step in steps]
        heat = [step.temperature for step in steps]
        scores = score_rows(self.model, [prompt + reply for prompt, reply in rows], heat, *self._limits)
        replies = [score[len(prompt) - 1 :] for score, (prompt, _) in zip(scores, rows, strict=True)]
        if self._same_tokens:
            return replies
        return [self._aligned(step, rows[i][1], replies[i]) for i, step in enumerate(steps)]

    def _row(self, step: Step) -> tuple[list[int], list[int]]:
        if self._same_tokens:
            own = step.teacher_messages
            prompt = list(step.prompt_ids) if own is None else self._render(self._student, own)
            return prompt, list(step.response_ids)
        prompt = self._render(self.tokenizer, step.teacher_messages or step.messages)
        text = b"".join(token_bytes(self._student, token) for token in step.response_ids).decode(errors="replace")
        reply = list(self.tokenizer.encode(text, add_special_tokens=False))
        return prompt, [*reply, self.tokenizer.eos_token_id] if self._ended(step) else reply

    def _render(self, tokenizer: Any, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise BackendError("the teacher needs the messages of a step to render its prompt, and the step has none")
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _ended(self, step: Step) -> bool:
        return bool(step.response_ids) and step.response_ids[-1] == self._student.eos_token_id

    def _aligned(self, step: Step, reply: Sequence[int], scores: Sequence[float]) -> list[float]:
        if step.logprobs is None:
            raise BackendError("a teacher with another tokenizer needs the sampled log-probabilities of the step")
        sizes = [len(token_bytes(self._student, token)) for token in step.response_ids]
        theirs = [len(token_bytes(self.tokenizer, token)) for token in reply]
        return align_logprobs(sizes, step.logprobs, theirs, scores)
