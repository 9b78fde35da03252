"""Runs an agent loop of verl as a workflow: its model calls are served by the run's engine, with exact token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_module  # pyright: ignore[reportMissingImports]
from hydra.errors import HydraException  # pyright: ignore[reportMissingImports]
from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
from verl.experimental.agent_loop.agent_loop import (  # pyright: ignore[reportMissingImports]
    AgentLoopBase,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
)
from verl.tools.tool_registry import load_all_tools  # pyright: ignore[reportMissingImports]
from verl.utils.dataset.rl_dataset import get_dataset_class  # pyright: ignore[reportMissingImports]
from verl.utils.import_utils import resolve_config_path  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.replica import TokenOutput  # pyright: ignore[reportMissingImports]

from headrace.config.loading import leaves
from headrace.data.episode import Episode, FinishReason, ModelOutput, TerminationReason, Trajectory, is_number
from headrace.data.task import Task
from headrace.errors import ConfigError, WorkflowError, boundary
from headrace.registry import nearest
from headrace.rollout.model_client import Model
from headrace.verl.rows import steps_of

__all__ = ["AgentLoopBase", "AgentLoopWorkflow"]

_HERE = ("actor_rollout_ref.rollout.name=vllm",)  # verl demands a name; the run's own engine serves
_CARRIED = ("temperature", "top_p")
_READ = {*_CARRIED, "top_k", "max_tokens", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos"}
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "n": 1}


class AgentLoopWorkflow:
    """One agent loop class. verl makes an instance per rollout, and so does this."""

    loop_class: ClassVar[type[Any]]

    def __init__(self, overrides: Sequence[str] = (), config: str | None = None, **arguments: Any) -> None:
        """`config` is a resolved configuration of verl's (YAML), or verl's defaults; `overrides` change it, in hydra's
        words. `arguments` go to the agent loop's class."""
        self._config = _read_config(config, overrides)
        self._arguments = arguments
        turns = self._config.actor_rollout_ref.rollout.multi_turn
        paths = {"tool_config_path": turns.tool_config_path, "function_tool_path": turns.function_tool_path}
        with boundary(ConfigError, "verl cannot load the tools of the agent loop"):
            self._tools = load_all_tools(
                **{key: resolve_config_path(path) if path else None for key, path in paths.items()}
            )
            self._dataset = get_dataset_class(self._config.data)

    async def run(self, task: Task, model: Model) -> Episode:
        """One rollout by the agent loop; the row that it returns is what is trained."""
        server = EngineServer(model, self._config.actor_rollout_ref.rollout)
        tokenizer = model.template.tokenizer
        loop = self.loop_class(
            trainer_config=DictConfigWrap(config=self._config),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=self._dataset,
            data_config=DictConfigWrap(self._config.data),
            hf_model_type=_model_type(tokenizer),
            tools=ToolListWrap(self._tools),
            **self._arguments,
        )
        output = await loop.run(_sampling(model), **row_of(task))
        return _episode(output, task, model, server.calls)


class EngineServer:
    """What an agent loop knows as its server manager: `generate` asks the run's own engine."""

    def __init__(self, model: Model, rollout: Any) -> None:
        self._model, self._rollout = model, rollout
        self.calls: list[ModelOutput] = []

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: dict[str, Any], **media: Any
    ) -> Any:
        """As verl's client: token ids in, token ids and log-probabilities out."""
        given = [name for name, value in media.items() if value and name.endswith("_data")]
        if given:
            raise WorkflowError(f"the agent loop gives {given[0]} with its prompt, and the engine reads text only")
        ids = [int(token) for token in prompt_ids]
        output = await self._model.complete(ids, **self._params(sampling_params, len(ids)))
        self.calls.append(output)
        versions = output.versions or (0,)
        return TokenOutput(
            token_ids=list(output.completion_ids),
            log_probs=list(output.logprobs),
            stop_reason="completed",
            extra_fields={
                "global_steps": versions[-1],
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
            },
        )

    def _params(self, given: dict[str, Any], prompt: int) -> dict[str, Any]:
        """The sampling settings of one call. What the engine cannot honour is refused, not left out."""
        known = {"logprobs", *_READ, *_NEUTRAL}
        refused = {key: value for key, value in given.items() if key not in known and value is not None}
        refused |= {key: given[key] for key, usual in _NEUTRAL.items() if given.get(key, usual) != usual}
        if refused:
            raise WorkflowError(f"the agent loop asks for {refused}, which the engine cannot do; leave it out")
        made: dict[str, Any] = {key: float(given[key]) for key in _CARRIED if given.get(key) is not None}
        if given.get("top_k") is not None:
            made["top_k"] = max(0, int(given["top_k"]))
        room = self._rollout.prompt_length + self._rollout.response_length - prompt
        usual = min(self._rollout.response_length, room)  # what verl's servers do without a limit
        asked = int(given.get("max_tokens") or given.get("max_new_tokens") or usual)
        made["max_tokens"] = max(1, min(asked, self._model.sampling.max_tokens or asked))  # rollout.max_tokens holds
        if given.get("stop"):
            made["stop"] = given["stop"] if isinstance(given["stop"], str) else tuple(given["stop"])
        if given.get("stop_token_ids"):
            made["stop_token_ids"] = tuple(int(token) for token in given["stop_token_ids"])
        if given.get("ignore_eos"):
            made["ignore_eos"] = True
        return made


def row_of(task: Task) -> dict[str, Any]:
    """The task as verl's dataset hands a row to an agent loop."""
    extra = task.metadata.get("extra_info") or {}
    return {
        "reward_model": {"style": "rule", "ground_truth": task.answer},
        "extra_info": extra,
        **task.metadata,
        "raw_prompt": [dict(message) for message in task.messages],
        "data_source": task.source,
        "uid": task.id,
        "index": extra.get("index", 0),
        "tools_kwargs": extra.get("tools_kwargs", {}),
        "interaction_kwargs": extra.get("interaction_kwargs", {}),
        "priority": 0,
    }


def _sampling(model: Model) -> dict[str, Any]:
    """The run's own sampling settings, as verl's worker gives them to a loop."""
    own = model.sampling
    return {
        "temperature": own.temperature,
        "top_p": own.top_p,
        "top_k": own.top_k or -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _episode(output: Any, task: Task, model: Model, calls: Sequence[ModelOutput]) -> Episode:
    outputs = output if isinstance(output, list) else [output]
    wrong = [type(one).__name__ for one in outputs if not isinstance(one, AgentLoopOutput)]
    if wrong or not outputs:
        raise WorkflowError(f"an agent loop returns an AgentLoopOutput, got {wrong[0] if wrong else 'an empty list'}")
    trajectories: list[Trajectory] = []
    metrics: dict[str, float] = {"num_turns": float(sum(one.num_turns for one in outputs))}
    for one in outputs:
        if one.multi_modal_data:
            raise WorkflowError("the agent loop returned images, video or sound, and only text can be trained here")
        steps = steps_of(
            one.prompt_ids, one.response_ids, one.response_mask, one.response_logprobs, calls, model.template.decode
        )
        first = [replace(step, messages=task.messages) for step in steps[:1]]
        trajectories.append(Trajectory((*first, *steps[1:]), reward=one.reward_score))
        rewards = [reward for reward in one.extra_fields.get("tool_rewards") or () if is_number(reward)]
        if rewards:
            metrics["tool_reward"] = metrics.get("tool_reward", 0.0) + sum(map(float, rewards))
    cut = any(t.steps and t.steps[-1].finish_reason != FinishReason.STOP for t in trajectories)
    reason = model.spending.met or (TerminationReason.LENGTH if cut else TerminationReason.DONE)
    return Episode(task.id, tuple(trajectories), termination=reason, metrics=metrics)


def _read_config(file: str | None, overrides: Sequence[str]) -> Any:
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(f'overrides must be a list such as ["data.max_response_length=1024"], got {overrides!r}')
    with boundary(ConfigError, "verl's configuration cannot be made"):
        if file is None:
            return _composed(overrides)
        if not Path(file).is_file():
            raise ConfigError(f"there is no verl configuration {file}; give a resolved one (--cfg job --resolve)")
        given = OmegaConf.load(file)
        _require_known(overrides, given)
        return OmegaConf.merge(given, OmegaConf.from_dotlist([word.lstrip("+") for word in overrides]))


def _composed(overrides: Sequence[str]) -> Any:
    """verl's defaults with changes."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        try:
            return compose("ppo_trainer", overrides=[*_HERE, *overrides])
        except HydraException:
            _require_known(overrides, compose("ppo_trainer", overrides=[*_HERE]))
            raise


def _require_known(overrides: Sequence[str], config: Any) -> None:
    """Raise ConfigError for a key that the configuration does not have, with the nearest. `+key=value` adds one."""
    known = [key for key, _ in leaves(OmegaConf.to_container(config, resolve=False))]
    for word in overrides:
        key, equals, _ = word.partition("=")
        if not equals:
            raise ConfigError(f'overrides: "{word}" has no value; write {word}=VALUE')
        if key[:1] not in "+~" and not any(one == key or one.startswith(f"{key}.") for one in known):
            raise ConfigError(f"overrides: verl has no {key}{nearest(key, known)}; +{word} adds it")


def _model_type(tokenizer: Any) -> str | None:
    """The architecture's name, by which verl knows how turns end; None, its default, where it cannot be found."""
    file = Path(str(getattr(tokenizer, "name_or_path", ""))) / "config.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    return found if isinstance(found, str) else None
