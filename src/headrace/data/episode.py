"""What happened: ModelOutput, Step, Trajectory, Episode, TrajectoryGroup."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.data.codec import JsonData, as_tuples, copied
from headrace.data.routing import RoutedExperts, require_routing
from headrace.data.task import Message
from headrace.errors import DataError

NO_ROLLOUT = -1  # it is not known which rollout of its group it is


class FinishReason(StrEnum):
    """Why one model call ended."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    MODEL_LENGTH = "model_length"  # prompt + response reached max_model_length
    CANCELLED = "cancelled"


class TerminationReason(StrEnum):
    """Why an episode ended. TURNS, TOKENS and TOOLS are budgets (of the run file, or of the workflow itself)."""

    DONE = "done"
    LENGTH = "length"  # a reply was cut by a token limit, or a prompt outgrew the model
    TURNS = "turns"
    TOKENS = "tokens"
    TOOLS = "tools"
    TIMEOUT = "timeout"
    ERROR = "error"
    JUDGE = "judge"  # the judger gave no verdict


def _require_lengths(owner: str, expected_name: str, expected: int, **lists: Sequence[Any] | None) -> None:
    for name, values in lists.items():
        if values is not None and len(values) != expected:
            raise DataError(f"{owner}: {name} has length {len(values)}, but {expected_name} has length {expected}")


class OwnedMessages(tuple[Message, ...]):
    """Messages that belong to Steps: copied when they come from outside, handed on as they are from Step to Step."""

    __slots__ = ()

    @classmethod
    def copy_of(cls, messages: Iterable[Message]) -> OwnedMessages:
        """The messages as they are now."""
        return cls(copied(message) for message in messages)


def is_number(value: Any) -> bool:
    """Whether it can be a reward: a number, also numpy's, or a tensor without axes."""
    return hasattr(type(value), "__float__") and not isinstance(value, str) and getattr(value, "ndim", 0) == 0


def as_reward(owner: str, value: Any) -> float | None:
    """The reward as a plain float, so that it can be written as JSON."""
    if value is None or type(value) is float:
        return value
    if not is_number(value):
        raise DataError(f"{owner}: reward must be a number, got {value!r}")
    return float(value)


@dataclass(frozen=True, slots=True)
class ModelOutput(JsonData):
    """What one model call returned.

    `logprobs` are under the distribution that was sampled from (temperature, top_p, top_k); `model_logprobs` under
    the model at temperature 1, and empty if the engine does not know them. `versions` is the policy version that
    sampled each token. `call` says which of the episode's model calls it was, in the order in which they began.
    `routed_experts` are those of prompt and completion, where the engine returns them.
    """

    text: str
    prompt_ids: tuple[Any, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str = FinishReason.STOP
    temperature: float = 1.0
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    call: int = 0
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        as_tuples(self, "prompt_ids", "completion_ids", "logprobs", "model_logprobs", "versions", "tool_calls")
        require_routing("ModelOutput", self.routed_experts, self.prompt_ids, self.completion_ids)
        _require_lengths(
            "ModelOutput",
            "completion_ids",
            len(self.completion_ids),
            logprobs=self.logprobs,
            model_logprobs=self.model_logprobs or None,
            versions=self.versions,
        )

    @property
    def message(self) -> Message:
        """The reply as an assistant message, to append to the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = copy.deepcopy(list(self.tool_calls))
        return message


@dataclass(frozen=True, slots=True)
class Step(JsonData):
    """One model call as training sees it: `messages` led to `text`.

    `prompt_ids` may hold opaque blocks (an image) among the integers. `teacher_messages` is the prompt that a
    teacher reads instead, if the step is distilled. A demonstration has neither logprobs nor versions. `call` says
    which of the episode's model calls it was. `advantage` is to have one number per response token; a list of another
    length is trained as zeros, with a warning. `routed_experts` are those of prompt and response, for a learner that
    routes tokens as the sampler did.
    """

    prompt_ids: tuple[Any, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    text: str = ""
    reward: float | None = None
    advantage: tuple[float, ...] | None = None
    temperature: float = 1.0
    finish_reason: str = FinishReason.STOP
    teacher_messages: tuple[Message, ...] | None = None
    call: int = 0
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        if is_number(self.advantage):
            raise DataError(
                f"Step: advantage must be a list with one number per response token, got the scalar {self.advantage}"
            )
        as_tuples(self, "prompt_ids", "response_ids", "logprobs", "versions", "advantage")
        object.__setattr__(self, "reward", as_reward("Step", self.reward))
        for name in ("messages", "teacher_messages"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, OwnedMessages):
                object.__setattr__(self, name, OwnedMessages.copy_of(value))
        _require_lengths("Step", "response_ids", len(self.response_ids), logprobs=self.logprobs, versions=self.versions)
        require_routing("Step", self.routed_experts, self.prompt_ids, self.response_ids)
        if self.versions is not None and self.logprobs is None:
            raise DataError(
                "Step: versions without logprobs; a sampled response has both, and a demonstration has neither"
            )

    @classmethod
    def from_model_output(
        cls,
        output: ModelOutput,
        messages: Sequence[Message] = (),
        reward: float | None = None,
        advantage: Sequence[float] | None = None,
    ) -> Step:
        """A Step with exactly the ids, logprobs and versions that were sampled, and its own copy of the messages."""
        return cls(
            prompt_ids=output.prompt_ids,
            response_ids=output.completion_ids,
            logprobs=output.logprobs,
            versions=output.versions,
            messages=messages,  # type: ignore[arg-type]  # copied by __post_init__
            text=output.text,
            reward=reward,
            advantage=advantage,  # type: ignore[arg-type]  # made a tuple, or refused, by __post_init__
            temperature=output.temperature,
            finish_reason=output.finish_reason,
            call=output.call,
            routed_experts=output.routed_experts,
        )


@dataclass(frozen=True, slots=True)
class Trajectory(JsonData):
    """The ordered Steps of one role, with a reward.

    `rollout_idx` is that of its Episode, from where groups are formed on; before, it is NO_ROLLOUT.
    """

    steps: tuple[Step, ...]
    name: str = "agent"
    reward: float | None = None
    rollout_idx: int = NO_ROLLOUT

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "reward", as_reward("Trajectory", self.reward))

    @property
    def final_reward(self) -> float | None:
        """Its reward or, where it has none, its last Step's."""
        if self.reward is None and self.steps:
            return self.steps[-1].reward
        return self.reward


@dataclass(frozen=True, slots=True)
class Episode(JsonData):
    """One rollout of one task."""

    task_id: str
    trajectories: tuple[Trajectory, ...] = ()
    group_id: int = 0
    rollout_idx: int = 0
    attempt: int = 0
    seed: int = 0
    source: str = "default"
    termination: str = TerminationReason.DONE
    is_correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(self.trajectories))

    @property
    def failed(self) -> bool:
        """Whether the episode says nothing about the policy: it broke or ran out of time."""
        return self.error is not None

    @property
    def reward(self) -> float:
        """Mean reward of the trajectories; 0 where there is none."""
        rewards = [t.final_reward for t in self.trajectories if t.final_reward is not None]
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def text(self) -> str:
        """The last thing the model said: the reply to its last call, whichever role that was."""
        last = [t.steps[-1] for t in reversed(self.trajectories) if t.steps]
        return max(last, key=lambda step: step.call).text if last else ""

    @property
    def response_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(step.response_ids) for t in self.trajectories for step in t.steps)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the model sampled: those of demonstrations have no version."""
        return sum(len(step.versions) for t in self.trajectories for step in t.steps if step.versions is not None)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup(JsonData):
    """Trajectories compared with each other: same task and role, or what a grouping hook says."""

    task_id: str
    name: str
    trajectories: tuple[Trajectory, ...]
    group_id: int = 0
    source: str = "default"

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(self.trajectories))

    @property
    def has_rewards(self) -> bool:
        """Whether `rewards` gives any; distilled groups need none."""
        return any(t.reward is not None or (t.steps and t.steps[-1].reward is not None) for t in self.trajectories)

    def rewards(self) -> tuple[float, ...]:
        """One reward per trajectory: all set, or all missing, which means the last Step's reward."""
        missing = sum(t.reward is None for t in self.trajectories)
        where = f'group of task "{self.task_id}", role "{self.name}"'
        if 0 < missing < len(self.trajectories):
            raise DataError(
                f"{where}: {missing} of {len(self.trajectories)} trajectories have no reward; set all or none"
            )
        rewards = tuple(t.final_reward for t in self.trajectories if t.final_reward is not None)
        if len(rewards) != len(self.trajectories):
            raise DataError(f"{where}: neither trajectories nor their last Steps have a reward")
        return rewards
