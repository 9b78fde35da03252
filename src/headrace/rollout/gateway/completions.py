"""POST /v1/completions, in OpenAI's format: text or ids in, text out, no chat template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from headrace.rollout.gateway.chat import HARMLESS, ChatCompletions, refuse_changed_sampling, refuse_several
from headrace.rollout.gateway.wire import (
    Call,
    Conversations,
    Event,
    Fields,
    Reply,
    pieces,
    read_sampling,
    read_stop,
    token_details,
    usage,
)


class Completions(ChatCompletions):
    """A prompt in, its continuation out."""

    path = "/v1/completions"

    def read(self, fields: Fields, before: Conversations) -> Call:
        """The request."""
        prompt = _prompt(fields)
        shared, stop = read_sampling(fields, "max_tokens"), read_stop(fields, "stop")
        options = fields.take("stream_options", dict, {})
        logprobs = fields.take("logprobs", int, None)
        if logprobs not in (None, 0, 1):
            fields.refuse("logprobs", f"must be 0 or 1, got {logprobs}: only the sampled token's is known")
        refuse_several(fields, "n", "best_of")
        fields.only("echo", False)
        fields.only("suffix", "")
        refuse_changed_sampling(fields)
        fields.ignore(*HARMLESS)
        fields.end()
        include = options.get("include_usage") is True
        return Call(prompt=prompt, stop=stop, logprobs=logprobs is not None, usage_in_stream=include, **shared)

    def response(self, call: Call, reply: Reply) -> dict[str, Any]:
        """The complete answer."""
        choice = _choice(reply.output.text, _finish(reply), _logprobs(call, reply))
        return {**_head(call, reply), "choices": [choice], "usage": _usage(reply), **token_details(call, reply)}

    def opening(self, call: Call, reply: Reply) -> list[Event]:
        """What a stream begins with."""
        return []

    def piece(self, call: Call, reply: Reply) -> Event:
        """A piece of a reply, as it is sampled."""
        return None, {**_head(call, reply), "choices": [_choice(reply.output.text, None, _logprobs(call, reply))]}

    def events(self, call: Call, reply: Reply) -> Iterator[Event]:
        """The answer as a stream."""
        return self.ending(call, reply)

    def ending(self, call: Call, reply: Reply) -> Iterator[Event]:
        """All of it: there is no opening."""
        head = _head(call, reply)
        for piece in pieces(reply.output.text):
            yield None, {**head, "choices": [_choice(piece, None, None)]}
        last = _choice("", _finish(reply), _logprobs(call, reply))
        yield None, {**head, "choices": [last], **token_details(call, reply)}
        if call.usage_in_stream:
            yield None, {**head, "choices": [], "usage": _usage(reply)}
        yield None, "[DONE]"


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    prompt = fields.take("prompt", (str, list))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        fields.refuse("prompt", "must be one text, or one list of token ids; make a request for each of several")
    return tuple(prompt)


def _head(call: Call, reply: Reply) -> dict[str, Any]:
    return {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created, "model": call.model}


def _choice(text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _finish(reply: Reply) -> str:
    return "length" if reply.cut else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    return usage(reply.output, "prompt_tokens", "completion_tokens")


def _logprobs(call: Call, reply: Reply) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    offsets = list(accumulate((len(token) for token in reply.tokens), initial=reply.offset))[: len(reply.tokens)]
    logprobs = list(reply.output.logprobs)
    return {"tokens": list(reply.tokens), "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
