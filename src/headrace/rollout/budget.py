"""What an episode may use: turns, sampled tokens, tool calls. Time is the loop's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.data.episode import FinishReason, ModelOutput, TerminationReason
from headrace.engines.base import DEFAULT_SAMPLING, SamplingParams
from headrace.errors import BudgetExceededError


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one episode, over all its roles; None for no limit."""

    turns: int | None = None
    tokens: int | None = None
    tool_calls: int | None = None


class Spending:
    """What one episode has used of its budget, and which limit it has met."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.turns = self.tokens = self.tool_calls = 0
        self._promised = 0  # tokens that calls under way may still sample
        self.met: TerminationReason | None = None

    def take_turn(self, params: SamplingParams) -> SamplingParams:
        """The parameters of one more model call, its length cut to the tokens that are left."""
        budget = self._budget
        if budget.turns is not None and self.turns >= budget.turns:
            raise self._exceeded(TerminationReason.TURNS, f"rollout.max_turns = {budget.turns}")
        wanted = params.max_tokens or DEFAULT_SAMPLING.max_tokens or 0
        if budget.tokens is not None:
            left = budget.tokens - self.tokens - self._promised
            if left <= 0:
                raise self._exceeded(TerminationReason.TOKENS, f"rollout.max_episode_tokens = {budget.tokens}")
            if left < wanted:
                params = replace(params, max_tokens=left)
                wanted = left
        self.turns += 1
        self._promised += wanted
        return params

    def end_turn(self, params: SamplingParams) -> None:
        """A call has ended, however it did."""
        self._promised -= params.max_tokens or DEFAULT_SAMPLING.max_tokens or 0

    def sampled(self, output: ModelOutput, params: SamplingParams) -> None:
        """Count what a call sampled. One that ran into the budget has met it."""
        self.tokens += len(output.completion_ids)
        if self.tokens == self._budget.tokens and output.finish_reason == FinishReason.LENGTH:
            self.met = TerminationReason.TOKENS

    def take_tool_call(self) -> None:
        """One more tool call."""
        limit = self._budget.tool_calls
        if limit is not None and self.tool_calls >= limit:
            raise self._exceeded(TerminationReason.TOOLS, f"rollout.max_tool_calls = {limit}")
        self.tool_calls += 1

    def _exceeded(self, reason: TerminationReason, limit: str) -> BudgetExceededError:
        self.met = reason
        return BudgetExceededError(f"the episode has used up its budget: {limit}", reason)
