"""The teacher of a distillation: reads the student's prompt, or a privileged one, and scores what the student said."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from headrace.backends.local.frozen import FrozenModel, score_rows
from headrace.config import RunConfig
from headrace.data.episode import Step
from headrace.data.packing import cut_by_tokens
from headrace.data.task import Message
from headrace.errors import BackendError, DataError, ModelError, boundary
from headrace.models.align import TokenBytes, align_logprobs


class Teacher(FrozenModel):
    """One teacher for the whole run. With a tokenizer of its own, its scores are aligned by bytes."""

    def __init__(self, config: RunConfig, student_tokenizer: Any, student_ends: Collection[int]) -> None:
        name = config.distill.teacher
        section = config.model
        if name != "initial":
            section = section.model_copy(update={"name": name, "lora": section.lora.model_copy(update={"rank": 0})})
        super().__init__(section)
        self._limits = (config.backend.micro_batch_tokens, config.backend.logits_chunk)
        self._student = student_tokenizer
        self._student_ends = student_ends
        self._same_tokens = self.tokenizer.get_vocab() == student_tokenizer.get_vocab()
        if not self._same_tokens:
            self._student_bytes, self._own_bytes = TokenBytes(student_tokenizer), TokenBytes(self.tokenizer)
            if self.tokenizer.eos_token_id is None:
                raise ModelError(f'the tokenizer of teacher "{name}" has no end-of-sequence token; use another teacher')

    def logprobs(self, steps: Sequence[Step]) -> list[list[float]]:
        """For each step, the teacher's log-probability of every response token."""
        split = [self._row(step) for step in steps]
        rows = [prompt + reply for prompt, reply in split]
        self._require_readable(rows)
        budget, chunk = self._limits
        cuts = cut_by_tokens(rows, budget)
        scores = score_rows(self.model, rows, [step.temperature for step in steps], cuts, chunk)
        replies = [score[len(prompt) - 1 :] for score, (prompt, _) in zip(scores, split, strict=True)]
        if self._same_tokens:
            return replies
        return [self._aligned(step, split[i][1], replies[i]) for i, step in enumerate(steps)]

    def _row(self, step: Step) -> tuple[list[int], list[int]]:
        """The teacher's ids of the prompt and of the reply."""
        if self._same_tokens:
            own = step.teacher_messages
            prompt = list(step.prompt_ids) if own is None else self._render(self._student, own)
            return prompt, list(step.response_ids)
        prompt = self._render(self.tokenizer, step.teacher_messages or step.messages)
        # a character that the student tore, or never finished, cannot be shown to the teacher as it is
        text = b"".join(map(self._student_bytes, self._said(step))).decode(errors="replace")
        reply = list(self.tokenizer.encode(text, add_special_tokens=False))
        return prompt, [*reply, self.tokenizer.eos_token_id] if self._ended(step) else reply

    def _render(self, tokenizer: Any, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise BackendError("the teacher needs the messages of a step to render its prompt, and the step has none")
        with boundary(DataError, "the teacher's prompt cannot be rendered"):
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _require_readable(self, rows: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, rows), default=0)
        if longest > self.model.max_length:
            raise DataError(
                f"the teacher reads at most {self.model.max_length} tokens, and a prompt with its reply has {longest}; "
                f"shorten the teacher's prompt, lower rollout.max_tokens or use another teacher"
            )

    def _ended(self, step: Step) -> bool:
        return step.response_ids[-1:] != () and step.response_ids[-1] in self._student_ends

    def _said(self, step: Step) -> tuple[int, ...]:
        """The reply without the token that ended it: every tokenizer has its own."""
        return step.response_ids[:-1] if self._ended(step) else step.response_ids

    def _aligned(self, step: Step, reply: Sequence[int], scores: Sequence[float]) -> list[float]:
        if step.logprobs is None:
            raise BackendError("a teacher with another tokenizer needs the sampled log-probabilities of the step")
        said, end = self._said(step), self._ended(step)
        text = reply[:-1] if end else reply
        student, own = [*map(self._student_bytes, said)], [*map(self._own_bytes, text)]
        aligned = align_logprobs(student, step.logprobs[: len(said)], own, scores[: len(text)])
        return [*aligned, scores[-1]] if end else aligned
