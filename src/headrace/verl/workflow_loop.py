"""Runs a workflow as an agent loop of verl: its model calls are served by verl's servers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import (  # pyright: ignore[reportMissingImports]
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)

from headrace.data.episode import Episode, FinishReason
from headrace.data.task import Task
from headrace.engines.base import Generation, SamplingParams
from headrace.errors import DataError, EngineError, WorkflowError
from headrace.judge.base import Judger, as_judger
from headrace.registry import resolve
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model
from headrace.rollout.outcome import RolloutSpec, to_episode
from headrace.rollout.workflow import as_run_function, until_no_room
from headrace.verl.rows import row_of_steps


class WorkflowLoop(AgentLoopBase):
    """`_target_` of an agent loop in verl's `agent_loop_config_path`, with `workflow: "module:name"` beside it."""

    def __init__(
        self,
        *given: Any,
        workflow: Any,
        args: dict[str, Any] | None = None,
        judger: Any = None,
        judger_args: dict[str, Any] | None = None,
        tools: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(*given, **others)
        self._run = as_run_function(
            resolve("workflow", workflow) if isinstance(workflow, str) else workflow, dict(args or {})
        )
        found = resolve("judger", judger) if isinstance(judger, str) else judger
        self._judger: Judger | None = None if found is None else as_judger(found, dict(judger_args or {}))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """One rollout, as the one row that verl trains."""
        task = task_of(row)
        rollout = self.rollout_config
        server = ServerEngine(self.server_manager, self.tokenizer, rollout)
        model = Model(server, ChatTemplate(self.tokenizer), _sampling(sampling_params, rollout), random.getrandbits(62))
        outcome = await until_no_room(self._run, task, model)
        episode = to_episode(outcome, model, RolloutSpec(task, 0, 0, 0))
        trajectories = [trajectory for trajectory in episode.trajectories if trajectory.steps]
        if len(trajectories) != 1:
            roles = ", ".join(trajectory.name for trajectory in trajectories)
            raise WorkflowError(f"verl trains one trajectory per rollout, and the workflow has {roles}; use one role")
        made = row_of_steps(trajectories[0])
        if len(made.prompt_ids) > rollout.prompt_length:
            raise WorkflowError(
                f"the prompt has {len(made.prompt_ids)} tokens, and actor_rollout_ref.rollout.prompt_length is "
                f"{rollout.prompt_length}; raise data.max_prompt_length"
            )
        most = rollout.response_length
        return AgentLoopOutput(
            prompt_ids=made.prompt_ids,
            response_ids=made.response_ids[:most],
            response_mask=made.mask[:most],
            response_logprobs=made.logprobs[:most],
            reward_score=await self._reward(task, episode, trajectories[0].final_reward),
            num_turns=2 * len(trajectories[0].steps),
            metrics=AgentLoopMetrics(),
            extra_fields={**server.extra_fields, "turn_scores": [], "tool_rewards": []},
        )

    async def _reward(self, task: Task, episode: Episode, own: float | None) -> float | None:
        """The workflow's own, or the judger's; None asks verl's reward function."""
        if own is not None or self._judger is None:
            return own
        return (await self._judger.judge(task, episode)).reward


class ServerEngine:
    """verl's servers as an engine: tokens in; tokens, log-probabilities and versions out."""

    def __init__(self, server_manager: Any, tokenizer: Any, rollout: Any) -> None:
        self._servers, self._rollout = server_manager, rollout
        self._eos = tokenizer.eos_token_id
        self._request = uuid4().hex  # one for the rollout: verl keeps its calls on one server
        self.extra_fields: dict[str, Any] = {}

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Generation:
        """One reply. Its random numbers are the server's: the seed is not sent."""
        ids = [int(token) for token in prompt_ids]
        room = self._rollout.prompt_length + self._rollout.response_length - len(ids)
        most = max(1, min(params.max_tokens or self._rollout.response_length, room))
        asked: dict[str, Any] = {name: getattr(params, name) for name in ("temperature", "top_p")}
        asked |= {"top_k": params.top_k or -1, "max_tokens": most, "repetition_penalty": 1.0, "logprobs": True}
        if params.stop:
            asked["stop"] = list(params.stop)
        if params.stop_token_ids:
            asked["stop_token_ids"] = list(params.stop_token_ids)
        if params.ignore_eos:
            asked["ignore_eos"] = True
        output = await self._servers.generate(request_id=self._request, prompt_ids=ids, sampling_params=asked)
        if output.log_probs is None or len(output.log_probs) != len(output.token_ids):
            raise EngineError(
                "verl's servers return no log-probabilities; set actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        self._note(output.extra_fields)
        ended = bool(output.token_ids) and (
            output.token_ids[-1] in (self._eos, *params.stop_token_ids) or len(output.token_ids) < most
        )
        version = int(output.extra_fields.get("global_steps") or 0)
        return Generation(
            tuple(ids), tuple(output.token_ids), tuple(map(float, output.log_probs)), (),
            (version,) * len(output.token_ids), FinishReason.STOP if ended else FinishReason.LENGTH,
            1.0 if params.temperature is None else params.temperature,
        )  # fmt: skip

    def _note(self, fields: dict[str, Any]) -> None:
        """What verl's trainer reads of the whole rollout: the first call's, with the last version of all."""
        latest = fields.get("max_global_steps")
        self.extra_fields = self.extra_fields or dict(fields)
        if latest is not None:
            self.extra_fields["max_global_steps"] = latest


def task_of(row: dict[str, Any]) -> Task:
    """A row of verl's dataset as a task."""
    if "raw_prompt" not in row:
        raise DataError("verl gave the agent loop no raw_prompt; set data.return_raw_chat=true")
    reward_model = row.get("reward_model") or {}
    metadata = {key: value for key, value in row.items() if key not in ("raw_prompt", "data_source", "reward_model")}
    return Task(
        id=str(row.get("uid") or row.get("index", 0)),
        messages=tuple(dict(message) for message in row["raw_prompt"]),
        answer=reward_model.get("ground_truth"),
        source=str(row.get("data_source", "default")),
        metadata=metadata,
    )


def loop_class(workflow: Any, args: dict[str, Any], judger: Any, judger_args: dict[str, Any]) -> type[WorkflowLoop]:
    """A subclass that needs no arguments of its own."""

    class BoundLoop(WorkflowLoop):
        """A workflow as an agent loop."""

        def __init__(self, *given: Any, **others: Any) -> None:
            bound = {"workflow": workflow, "args": args, "judger": judger, "judger_args": judger_args}
            super().__init__(*given, **(others | bound))

    name = workflow if isinstance(workflow, str) else getattr(workflow, "__name__", "Workflow")
    BoundLoop.__name__ = BoundLoop.__qualname__ = f"{name.rpartition(':')[2]}_loop"
    return BoundLoop


def _sampling(given: dict[str, Any], rollout: Any) -> SamplingParams:
    return SamplingParams(
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=max(0, int(given.get("top_k", -1))),
        max_tokens=rollout.response_length,
        stop=(),
    )
