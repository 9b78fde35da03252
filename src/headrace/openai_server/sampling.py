"""From a request to what the engine is asked, and from what it sampled to a reply."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.episode import ModelOutput
from headrace.data.seeds import derive_seed
from headrace.engines.base import DEFAULT_SAMPLING, Generation, SamplingParams
from headrace.openai_server.served import Served, Streams
from headrace.rollout.gateway.chat import ChatCompletions
from headrace.rollout.gateway.wire import Call, Fields, Refusal, parse_json

MOST_CHOICES = 128
OnTokens = Callable[[Sequence[int], Sequence[float]], None]
_REMEDY = "this engine samples from the model as it is; leave it out"
_calls = itertools.count()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what is sampled, how, and once per seed."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    call: Call


def read_request(api: ChatCompletions, raw: bytes, served: Served, max_tokens: int) -> Asked:
    """A request of OpenAI's API. Unlike in training, the client decides how its replies are sampled."""
    body = parse_json(raw)
    if not isinstance(body, dict):
        Fields(body)  # refuses it
    own = Fields({key: body.pop(key) for key in ("n", "seed", "best_of") if key in body})
    count, seed = read_count(own), own.take("seed", int, None)
    own.only("best_of", 1, remedy="make several requests, and choose")
    body.setdefault("model", served.name)
    rest = Fields(body)
    for name in ("presence_penalty", "frequency_penalty"):
        rest.only(name, 0, 0.0, remedy=_REMEDY)
    rest.only("logit_bias", {}, remedy=_REMEDY)
    call = api.read(rest, _NO_CONVERSATIONS)
    check_model(call.model, served)
    if call.token_ids and count > 1:
        own.refuse("n", f"must be 1 with return_token_ids, got {count}; use /inference/v1/generate, which has both")
    params = SamplingParams(
        max_tokens=call.max_tokens or max_tokens, stop=call.stop, **_as_params(call.requested_sampling)
    )
    return Asked(_prompt_ids(call, served), params.filled(DEFAULT_SAMPLING), seeds_of(seed, count), call)


def read_count(fields: Fields) -> int:
    """How many replies are wanted."""
    count = fields.take("n", int, 1)
    if not 1 <= count <= MOST_CHOICES:
        fields.refuse("n", f"must be between 1 and {MOST_CHOICES}, got {count}")
    return count


def check_model(name: str, served: Served) -> None:
    """A client that wants another model must not get this one."""
    if name != served.name:
        shown = name[:200]
        raise Refusal(404, f'there is no model "{shown}" here; this server has "{served.name}"', "model_not_found")


def seeds_of(seed: int | None, count: int) -> tuple[int, ...]:
    """One seed per reply: the same for the same request, or new ones if the client gave none."""
    first = secrets.randbits(63) if seed is None else seed
    return (first, *(derive_seed(first, number) for number in range(1, count)))


async def sample(served: Served, asked: Asked, seed: int, on_tokens: OnTokens | None = None) -> Generation:
    """One completion; cancelled, it frees its slot in the engine."""
    engine = served.engine
    if on_tokens is not None and isinstance(engine, Streams):
        return await engine.stream(asked.prompt_ids, asked.params, seed, on_tokens)
    return await engine.generate(asked.prompt_ids, asked.params, seed)


def read_output(served: Served, asked: Asked, generation: Generation) -> ModelOutput:
    """What was said: a chat's reply is split into content, reasoning and tool calls."""
    stop = asked.params.stop or ()
    if asked.call.prompt is None and served.template is not None:
        return served.template.parse(generation, stop, next(_calls), asked.call.tools)
    text = served.decode(generation.completion_ids)
    cut = min((at for at in (text.find(word) for word in stop) if at >= 0), default=len(text))
    return as_output(generation, text[:cut])


def as_output(generation: Generation, text: str) -> ModelOutput:
    """A generation with its text."""
    return ModelOutput(
        text=text, content=text, prompt_ids=generation.prompt_ids, completion_ids=generation.completion_ids,
        logprobs=generation.logprobs, model_logprobs=generation.model_logprobs, versions=generation.versions,
        finish_reason=generation.finish_reason, temperature=generation.temperature,
        routed_experts=generation.routed_experts,
    )  # fmt: skip


def _prompt_ids(call: Call, served: Served) -> tuple[int, ...]:
    if isinstance(call.prompt, str):
        return served.encode(call.prompt)
    if call.prompt is not None:
        return call.prompt
    if served.template is None:
        said = f'"{served.name}" has no chat template and cannot chat; use /v1/completions'
        raise Refusal(400, said, "no_chat_template")
    return served.template.render(call.messages, call.tools)


def _as_params(given: Any) -> dict[str, Any]:
    values = dict(given)
    if "top_k" in values:
        values["top_k"] = max(0, int(values["top_k"]))  # other servers' -1 means all, too
    return values


class _NoConversations:
    def conversation(self, response_id: str) -> None:
        return None


_NO_CONVERSATIONS = _NoConversations()
