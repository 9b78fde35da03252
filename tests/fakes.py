"""What several tests share: a tokenizer of characters, an engine that says what it is told, builders of data."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import settings

from headrace.config import RunConfig
from headrace.config.effect import idle_settings
from headrace.config.loading import build_config
from headrace.data.episode import Episode, FinishReason, Step, Trajectory
from headrace.engines.base import EngineAbilities, EngineHealth, Generation, ModelHost, SamplingParams
from headrace.errors import EngineError, PromptTooLongError
from headrace.rollout.chat import ChatTemplate

ROOT = Path(__file__).parent.parent
# no deadline: a core that others use too is slow at times, and that is no failure
examples = settings(deadline=None, max_examples=40)


def effective_config(values: dict[str, Any]) -> RunConfig:
    """The configuration without the settings that have no effect in it: a matrix of settings has some in places."""
    values = copy.deepcopy(values)
    while idle := next(idle_settings(build_config(values, may_be_idle=True)), None):
        section: Any = values
        # a set that is never evaluated goes as one
        *parents, last = idle.key.removesuffix(".tasks").split(".")
        for part in parents:
            section = section[part]
        del section[last]
    return build_config(values)


@cache
def bundled_tokenizer() -> Any:
    """The tokenizer of the bundled model, trained anew by the script that makes the model."""
    spec = importlib.util.spec_from_file_location("make_bundled_model", ROOT / "scripts" / "make_bundled_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its data classes look their module up
    spec.loader.exec_module(module)
    return module.make_tokenizer()


class CharTokenizer:
    """One id per character, ChatML, and an end token: enough of a tokenizer for `ChatTemplate`."""

    chat_template = "ChatML"
    eos_token = "<|im_end|>"
    eos_token_id = 1
    _specials = ("<|im_start|>", "<|im_end|>")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        for index, special in enumerate(self._specials):
            text = text.replace(special, chr(index))
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        specials = ("", "") if skip_special_tokens else self._specials
        return "".join(specials[i] if i < len(specials) else chr(i) for i in ids)

    def apply_chat_template(self, messages: Sequence[Any], tokenize: bool, add_generation_prompt: bool) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" * add_generation_prompt


def char_chat() -> ChatTemplate:
    """A chat template over characters."""
    return ChatTemplate(CharTokenizer())


def random_word(seed: int) -> str:
    """A reply that is a function of the seed alone."""
    rng = random.Random(seed)
    return "".join(rng.choice("abcdef") for _ in range(rng.randint(1, 5)))


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine was asked."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


class FakeEngine:
    """A rollout engine without a model: `reply(seed)` is the text it answers with, or the very ids.

    Text ends with the end token unless `max_tokens` cuts it. `takes_s` is how long an answer takes, or one duration
    per request; `breaks` makes every request fail; `room` is the longest prompt.
    """

    def __init__(
        self,
        reply: Callable[[int], str | Sequence[int]] = random_word,
        tokenizer: Any = None,
        takes_s: float | Sequence[float] = 0.0,
        breaks: str = "",
        room: int = 10**6,
    ) -> None:
        self._reply = reply
        self._tokenizer = tokenizer or CharTokenizer()
        self._takes_s = takes_s
        self._breaks = breaks
        self._room = room
        self.version = 0
        self.pinned: int | None = None
        self.restarts = 0
        self.requests: list[Request] = []
        self.busy = self.most_busy = 0

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, pinned: bool = False
    ) -> Generation:
        takes_s = self._takes_s if isinstance(self._takes_s, int | float) else self._takes_s[len(self.requests)]
        self.requests.append(Request(tuple(prompt_ids), params, seed))
        if len(prompt_ids) > self._room:
            raise PromptTooLongError(f"the prompt has {len(prompt_ids)} tokens, more than {self._room}")
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            await asyncio.sleep(takes_s)
        finally:
            self.busy -= 1
        if self._breaks:
            raise EngineError(self._breaks)
        ids = self._ids(self._reply(seed))[: params.max_tokens]
        logprobs = tuple(-1.0 - index / 8 for index in range(len(ids)))
        return Generation(
            prompt_ids=tuple(prompt_ids),
            completion_ids=ids,
            logprobs=logprobs,
            model_logprobs=logprobs,
            versions=(self.pinned if pinned and self.pinned is not None else self.version,) * len(ids),
            finish_reason=FinishReason.STOP if ids[-1:] == (self._tokenizer.eos_token_id,) else FinishReason.LENGTH,
            temperature=1.0 if params.temperature is None else params.temperature,
        )

    def _ids(self, reply: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(reply, str):
            return (*self._tokenizer.encode(reply, add_special_tokens=False), self._tokenizer.eos_token_id)
        return tuple(reply)

    async def compute_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(row) - 1) for row in rows]

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def begin_update(self, version: int) -> None: ...

    async def end_update(self, version: int) -> str:
        self.version = version
        return FakeWeights.DIGEST

    async def pin(self) -> int:
        self.pinned = self.version
        return self.version

    async def unpin(self) -> None:
        self.pinned = None

    async def release_cache(self) -> None: ...

    async def restart(self) -> None:
        self.restarts += 1

    def health(self) -> EngineHealth:
        return EngineHealth(True, False, self.version, self.busy, 0, 0, 0.0, restarts=self.restarts, pinned=self.pinned)

    async def close(self) -> None: ...


class FakeWeights:
    """Source and sender of weights that are none, for a `FakeEngine`."""

    DIGEST = "0" * 16
    in_place = True

    async def digest(self) -> str:
        return self.DIGEST

    async def send(self, version: int) -> None: ...


IN_PLACE = EngineAbilities(("in_place",))


@dataclass(frozen=True)
class FakeEngines:
    """An engine as it is registered: `new_engine` makes it, and `can` says what it can do."""

    new_engine: Callable[[], FakeEngine] = FakeEngine
    can: EngineAbilities = IN_PLACE

    def abilities(self, config: RunConfig) -> EngineAbilities:
        return self.can

    def __call__(self, config: RunConfig, host: ModelHost) -> FakeEngine:
        return self.new_engine()


class FakeHost:
    """The part of a backend that an engine meets."""

    tokenizer = CharTokenizer()
    transports: ClassVar[tuple[str, ...]] = ("in_place",)

    def host(self, transport: str) -> ModelHost:
        weights = FakeWeights()
        return ModelHost(self.tokenizer, (CharTokenizer.eos_token_id,), None, weights, weights)


def step(prompt: Sequence[Any], response: Sequence[int], **fields: Any) -> Step:
    """A Step with logprobs and versions made up."""
    count = len(response)
    given = {"logprobs": tuple(-float(i + 1) for i in range(count)), "versions": (0,) * count, **fields}
    return Step(tuple(prompt), tuple(response), **given)


def trajectory(reward: float | None = None, role: str = "agent", **fields: Any) -> Trajectory:
    """A trajectory of one short Step, which takes the other fields."""
    return Trajectory((step([1, 2], [3, 4, 5], **fields),), role, reward)


def episode(*rewards: float, **fields: Any) -> Episode:
    """An episode with one trajectory per reward, all of the role "agent"."""
    return Episode(**{"task_id": "t", "trajectories": tuple(trajectory(reward) for reward in rewards), **fields})
