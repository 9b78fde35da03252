"""The model as a workflow sees it: chat in, `ModelOutput` out, every call recorded with its exact token ids.

In a conversation the next prompt is the ids so far plus the rendered new messages: what was sampled is never
tokenised again. A history that was changed (compaction, stripped thinking) starts a new row and is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.agents.chat import ChatTemplate
from headrace.data.episode import FinishReason, ModelOutput, Step, Trajectory
from headrace.data.seeds import derive_seed
from headrace.data.task import Message
from headrace.engine.base import RolloutEngine, SamplingParams


class Model:
    """Handed to a workflow for one episode. Not shared between episodes."""

    def __init__(self, engine: RolloutEngine, chat: ChatTemplate, sampling: SamplingParams, seed: int) -> None:
        self._engine = engine
        self._template = chat
        self._sampling = sampling
        self._seed = seed
        self._calls = 0
        self._steps: dict[str, list[Step]] = {}
        self._last: dict[str, tuple[tuple[Message, ...], ModelOutput]] = {}
        self.diverged_prefixes = 0

    async def chat(self, messages: Sequence[Message], role: str = "agent", **sampling: Any) -> ModelOutput:
        """Sample a reply to the conversation. `role` names the trajectory that the call belongs to.

        Keyword arguments (`temperature`, `top_p`, `top_k`, `max_tokens`, `stop`, …) go over the run's own settings.
        """
        if isinstance(sampling.get("stop"), str):
            sampling["stop"] = (sampling["stop"],)
        params = replace(self._sampling, **sampling)
        history = copy.deepcopy(tuple(messages))  # at once: the workflow may change its list while the model answers
        prompt_ids = self._prompt_ids(role, history)
        seed = derive_seed(self._seed, self._calls)
        self._calls += 1
        generation = await self._engine.generate(prompt_ids, params, seed)
        output = self._template.parse(generation, stop=params.stop or ())
        self._last[role] = (history, output)
        self._steps.setdefault(role, []).append(Step.from_model_output(output, history))
        return output

    def trajectories(self, reward: float | None = None) -> list[Trajectory]:
        """One trajectory per role, of the calls made so far."""
        return [Trajectory(steps=tuple(steps), name=name, reward=reward) for name, steps in self._steps.items()]

    def demonstrate(self, messages: Sequence[Message]) -> list[Step]:
        """Steps whose responses are the assistant turns of a given conversation: nothing is sampled."""
        return self._template.demonstration(messages)

    def _prompt_ids(self, role: str, messages: tuple[Message, ...]) -> tuple[int, ...]:
        if role not in self._last:
            return self._template.render(messages)
        before, output = self._last[role]
        extended = self._template.extend(before, output, messages)
        if extended is None:
            self.diverged_prefixes += 1
            return self._template.render(messages)
        return extended


def hit_limit(output: ModelOutput) -> bool:
    """Whether the reply was cut by a token limit."""
    return output.finish_reason in (FinishReason.LENGTH, FinishReason.MODEL_LENGTH)
