"""Conversations to token ids and back, with the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from headrace.data.episode import ModelOutput, Step
from headrace.data.task import Message
from headrace.engines.base import Generation
from headrace.errors import DataError, ModelError, boundary
from headrace.rollout.messages import ToolSchema, normal, same_reply, split_tool_calls, written_out

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_TAIL = 16  # tokens, enough to hold _THINK_OPEN however it is split
_KEPT_TEXTS, _LONGEST_KEPT = 64, 20_000
"""How many texts are kept with their ids, and up to how many characters: the rollouts of a group have one prompt."""


class ChatTemplate:
    """Renders with a tokenizer (anything with `apply_chat_template`, `encode`, `decode`)."""

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ModelError("the model's tokenizer has no chat template; use an instruction-tuned model")
        self._tokenizer = tokenizer
        self._eos_text: str = tokenizer.eos_token or ""
        self._knows_tools = "tools" in str(tokenizer.chat_template)
        self._kept_ids = lru_cache(_KEPT_TEXTS)(self._encode)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer itself, for code that renders in its own way."""
        return self._tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Prompt ids of a conversation, ready for the assistant's reply."""
        return self.encode(self._text(normal(messages), tools))

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of template text; adds no special tokens of its own."""
        return (self._kept_ids if len(text) <= _LONGEST_KEPT else self._encode)(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def extend(
        self,
        before: Sequence[Message],
        output: ModelOutput,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> tuple[int, ...] | None:
        """Prompt ids for `messages` that begin with the exact ids of `before` and its reply.

        None if the messages do not extend that conversation, or the template would show it otherwise from now on.
        """
        size = len(before)
        if len(messages) <= size:
            return None
        before, messages = normal(before), normal(messages)
        if messages[:size] != before:
            return None
        prompt, whole = self._text(before, tools), self._text(messages, tools)
        tail = self._after_text(prompt, output, messages[size], whole)
        if tail is None and same_reply(messages[size], *normal([output.message])):
            tail = self._after_turn(prompt, output, self._text(messages[: size + 1], tools, generate=False), whole)
        return None if tail is None else (*output.prompt_ids, *output.completion_ids, *self.encode(tail))

    def _after_text(self, prompt: str, output: ModelOutput, reply: Message, whole: str) -> str | None:
        """What comes after the reply, if the template shows it letter for letter."""
        head = prompt + output.text
        if not whole.startswith(head):
            return None
        tail, end = whole[len(head) :], self._sampled_end(output)
        if tail.startswith(end):
            return tail[len(end) :]
        if reply.get("content") not in (output.content, output.text):
            return None  # the workflow wrote on after a reply that had ended
        return tail

    def _after_turn(self, prompt: str, output: ModelOutput, turn: str, whole: str) -> str | None:
        """What comes after the reply, if the template writes it in its own way (trimmed, a tool call's spaces)."""
        if not (turn.startswith(prompt) and whole.startswith(turn)):
            return None  # earlier turns look different from here on: reasoning is stripped, for example
        shown = turn[len(prompt) :]
        if output.reasoning and output.reasoning.strip() not in shown:
            return None
        end = self._sampled_end(output)
        at = shown.rfind(end or self._eos_text)
        if at < 0 or not (end or self._eos_text):
            return None
        return shown[at + len(end) :] + whole[len(turn) :]

    def parse(
        self, generation: Generation, stop: Sequence[str] = (), call: int = 0, tools: Sequence[ToolSchema] = ()
    ) -> ModelOutput:
        """Text, content, reasoning and tool calls of a generation; its ids stay as they were sampled."""
        text = self.decode(generation.completion_ids)
        cut = min((at for at in (text.find(word) for word in stop) if at >= 0), default=len(text))
        text = text[:cut]
        reasoning, content = self._split_reasoning(text, generation.prompt_ids)
        content, tool_calls = split_tool_calls(content, tools, call) if tools else (content, ())
        return ModelOutput(
            text=text,
            content=content,
            tool_calls=tool_calls,
            reasoning=reasoning,
            prompt_ids=generation.prompt_ids,
            completion_ids=generation.completion_ids,
            logprobs=generation.logprobs,
            model_logprobs=generation.model_logprobs,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            temperature=generation.temperature,
            call=call,
            routed_experts=generation.routed_experts,
        )

    def demonstration(self, messages: Sequence[Message]) -> list[Step]:
        """One Step per assistant turn of a given conversation, its ids rendered with the template."""
        steps: list[Step] = []
        messages = normal(messages)
        ids: tuple[int, ...] = ()
        done = ""
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self._text(messages[:index])
            reply = self._text(messages[: index + 1], generate=False)
            if not (prompt.startswith(done) and reply.startswith(prompt)):
                raise DataError("the chat template rewrites earlier turns, so this conversation cannot be one row")
            response = reply[len(prompt) :]
            at = response.find(self._eos_text) if self._eos_text else -1
            response = response[: at + len(self._eos_text)] if at >= 0 else response
            ids = (*ids, *self.encode(prompt[len(done) :]))
            response_ids = self.encode(response)
            steps.append(Step(ids, response_ids, messages=tuple(messages[:index]), text=str(message.get("content"))))
            ids, done = (*ids, *response_ids), prompt + response
        if not steps:
            raise DataError("a demonstration needs at least one assistant message, and this conversation has none")
        return steps

    def _split_reasoning(self, text: str, prompt_ids: Sequence[Any]) -> tuple[str | None, str]:
        if _THINK_CLOSE not in text:
            return None, text
        if not text.lstrip().startswith(_THINK_OPEN) and not self.opens_thinking(prompt_ids):
            return None, text
        thought, _, content = text.partition(_THINK_CLOSE)
        return thought.lstrip().removeprefix(_THINK_OPEN).strip("\n"), content.lstrip("\n")

    def opens_thinking(self, prompt_ids: Sequence[Any]) -> bool:
        """Whether the template itself began the reply's reasoning."""
        tail = [token for token in prompt_ids[-_TAIL:] if isinstance(token, int)]
        return self._tokenizer.decode(tail).rstrip("\n").endswith(_THINK_OPEN)

    def _sampled_end(self, output: ModelOutput) -> str:
        """Text of the special token (end of sequence or of turn) that the reply ends with; nothing if it was cut."""
        last = output.completion_ids[-1:]
        return "" if self.decode(last) else self._tokenizer.decode(list(last))

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), generate: bool = True) -> str:
        """The conversation as the model reads it; the messages are in normal form."""
        shown: dict[str, Any] = {}
        if not self._knows_tools:
            messages = written_out(messages, tools)
        elif tools:
            shown = {"tools": list(tools)}
        with boundary(DataError, "the chat template cannot render the messages"):
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generate, **shown
            )
