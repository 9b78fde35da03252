"""Answers of /v1/chat/completions and /v1/completions: complete, or as they are sampled."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.data.episode import ModelOutput
from headrace.engines.base import Generation
from headrace.openai_server.pieces import TextPieces, may_think
from headrace.openai_server.sampling import Asked, as_output, read_output, sample
from headrace.openai_server.served import Served
from headrace.rollout.gateway.chat import ChatCompletions
from headrace.rollout.gateway.responding import frame
from headrace.rollout.gateway.wire import Event, Reply


class Answer:
    """One answer. Its replies, one per seed, are sampled side by side."""

    def __init__(self, api: ChatCompletions, served: Served, asked: Asked) -> None:
        self._api, self._served, self._asked = api, served, asked
        nothing = Generation(asked.prompt_ids, (), (), (), (), "stop", 1.0)
        self._empty = Reply(secrets.token_hex(12), int(time.time()), as_output(nothing, ""))
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        """What is to be sent of a stream."""

    async def complete(self) -> dict[str, Any]:
        """The answer in one piece."""
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(sample(self._served, self._asked, seed)) for seed in self._asked.seeds]
        bodies = [self._api.response(self._asked.call, self._reply(task.result())) for task in running]
        choices = [{**body["choices"][0], "index": index} for index, body in enumerate(bodies)]
        return {**bodies[0], "choices": choices, "usage": _total([body["usage"] for body in bodies])}

    async def stream(self) -> None:
        """Put the answer into `frames`, as it is sampled."""
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._stream(*given)) for given in enumerate(self._asked.seeds)]
        ends = [task.result() for task in running]
        if self._asked.call.usage_in_stream:
            usages = [data["usage"] for _, data in ends if isinstance(data, dict)]
            _, last = ends[0]
            assert isinstance(last, dict)
            self.frames.put_nowait(frame(None, {**last, "usage": _total(usages)}))
        self.frames.put_nowait(frame(None, "[DONE]"))

    async def _stream(self, index: int, seed: int) -> Event:
        """One of the replies. Returns its count of tokens, which is sent when all are done."""
        call, sent = self._asked.call, _Sent(self, index)
        generation = await sample(self._served, self._asked, seed, sent.hear)
        reply = self._reply(generation)
        output = sent.finish(reply.output)
        *events, usage, _done = self._api.ending(
            replace(call, logprobs=False, usage_in_stream=True), replace(reply, output=output)
        )
        self._send(index, events)
        return usage

    def _reply(self, generation: Generation) -> Reply:
        output = read_output(self._served, self._asked, generation)
        return replace(self._empty, output=output, tokens=self._tokens(generation.completion_ids))

    def _tokens(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._served.decode([token]) for token in ids) if self._asked.call.logprobs else ()

    def open(self, index: int) -> None:
        """What comes first; not before something is sampled, so that a failure is no stream."""
        self._send(index, self._api.opening(self._asked.call, self._empty))

    def send_piece(self, index: int, text: str, ids: Sequence[int], logprobs: Sequence[float], offset: int) -> None:
        """Some text, and the tokens that it comes from."""
        nobody = (0,) * len(ids)
        part = Generation(self._asked.prompt_ids, tuple(ids), tuple(logprobs), tuple(logprobs), nobody, "stop", 1.0)
        reply = replace(self._empty, output=as_output(part, text), tokens=self._tokens(ids), offset=offset)
        self._send(index, [self._api.piece(self._asked.call, reply)])

    def _send(self, index: int, events: Sequence[Event]) -> None:
        for name, data in events:
            assert isinstance(data, dict)
            for choice in data["choices"]:
                choice["index"] = index
            self.frames.put_nowait(frame(name, data))

    def new_pieces(self) -> TextPieces | None:
        """What turns tokens into text; None if only the end says what of a reply is text."""
        call, template = self._asked.call, self._served.template
        if call.tools or (
            call.prompt is None and template is not None and template.opens_thinking(self._asked.prompt_ids)
        ):
            return None
        return TextPieces(self._served.decode, self._asked.params.stop or ())

    @property
    def is_chat(self) -> bool:
        """Whether a reply may begin with reasoning."""
        return self._asked.call.prompt is None


class _Sent:
    """What has been sent of one reply."""

    def __init__(self, answer: Answer, index: int) -> None:
        self._answer, self._index = answer, index
        self._pieces = answer.new_pieces()
        self._begun = False
        self._text = self._held = ""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._tokens = 0

    def hear(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Send the text of the tokens, unless it may be something else than text."""
        self._begin()
        self._ids += ids
        self._logprobs += logprobs
        if self._pieces is None:
            return
        self._held += self._pieces.feed(ids)
        if self._held and not (self._answer.is_chat and not self._text and may_think(self._held)):
            self._send(self._held, self._ids, self._logprobs)
            self._held, self._ids, self._logprobs = "", [], []

    def finish(self, output: ModelOutput) -> ModelOutput:
        """Send what is left of the text; returns the reply without its text, unless more than text is in it."""
        self._begin()
        if output.reasoning is not None or output.tool_calls:
            self._send("", output.completion_ids, output.logprobs)
            return output
        rest = output.text[len(self._text) :] if output.text.startswith(self._text) else ""
        self._send(rest, output.completion_ids[self._tokens :], output.logprobs[self._tokens :])
        return replace(output, text="", content="")

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._answer.open(self._index)

    def _send(self, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if text or ids:
            self._answer.send_piece(self._index, text, ids, logprobs, len(self._text))
        self._text += text
        self._tokens += len(ids)


def _total(usages: Sequence[dict[str, int]]) -> dict[str, int]:
    """The prompt is read once, whatever is made of it."""
    prompt, completion = usages[0]["prompt_tokens"], sum(usage["completion_tokens"] for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
