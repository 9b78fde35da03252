"""Workflows as agent loops in verl itself: its dataset, agent loop workers, client, load balancer and advantages."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import ROOT
from headrace.backends.verl.platform import choose_platform, platform_variables
from headrace.config.loading import build_config
from headrace.data.episode import Episode
from headrace.data.sample import merge_steps
from headrace.data.task import Task
from headrace.engines.base import SamplingParams
from headrace.models.catalog import resolve_model
from headrace.rollout.chat import ChatTemplate
from headrace.rollout.model_client import Model
from headrace.rollout.outcome import RolloutSpec, to_episode
from verl_pool import WHY, has_verl, verl_sections

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_verl(), reason=WHY)]

QUESTIONS = ("What is 2 plus 3?", "Name a colour.", "Count to four.", "Say hello.")
LOOPS = [
    {"name": "twice", "_target_": "verl_inside.AskTwice"},
    {
        "name": "once", "_target_": "headrace.verl.workflow_loop.WorkflowLoop", "workflow": "verl_inside:ask_once",
        "judger": "exact",
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray on this machine, whose processes find the tests' modules and take the CPU for verl's platform."""
    config = build_config(verl_sections(1))
    choose_platform(config)
    ray = importlib.import_module("ray")
    env = {**platform_variables(config), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    yield ray
    ray.shutdown()


def verl_config(folder: Path) -> Any:
    """verl's own trainer configuration, for the bundled model and the two agent loops."""
    (folder / "loops.json").write_text(json.dumps(LOOPS))  # JSON is YAML
    hydra = importlib.import_module("hydra")
    at = "actor_rollout_ref.rollout"
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(
            "ppo_trainer",
            overrides=[
                f"{at}.name=bundled", f"{at}.nnodes=1", f"{at}.n_gpus_per_node=1", f"{at}.tensor_model_parallel_size=1",
                f"{at}.agent.num_workers=2", f"{at}.agent.agent_loop_config_path={folder / 'loops.json'}",
                f"{at}.temperature=1.0", f"actor_rollout_ref.model.path={resolve_model('bundled')}",
                "data.max_prompt_length=256", "data.max_response_length=96", "data.return_raw_chat=true",
                "data.filter_overlong_prompts=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            ],
        )  # fmt: skip


def batch_of(config: Any, folder: Path, tokenizer: Any) -> Any:
    """A training batch as verl's trainer makes it: from a file of rows, each prompt twice."""
    rows = [
        {
            "prompt": [{"role": "user", "content": question}], "data_source": "asked",
            "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": number},
            "agent_name": ("twice", "once")[number % 2],
        }
        for number, question in enumerate(QUESTIONS)
    ]  # fmt: skip
    file = folder / "rows.parquet"
    importlib.import_module("pandas").DataFrame(rows).to_parquet(file)
    data = importlib.import_module("verl.utils.dataset.rl_dataset")
    dataset = data.RLHFDataset(str(file), tokenizer, config.data)
    batch = importlib.import_module("verl").DataProto.from_single_dict(data.collate_fn([dataset[i] for i in range(4)]))
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["agent_name"]  # rows of one loop are compared
    return batch.repeat(repeat_times=2, interleave=True)


async def in_headrace(workflow: Any, question: str, engine: Any) -> Episode:
    """The same workflow, run by Headrace alone."""
    task = Task(id="0", messages=({"role": "user", "content": question},), answer="5")
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=96, stop=())
    model = Model(engine, ChatTemplate(engine.backend.tokenizer), sampling, seed=0)
    return to_episode(await workflow(task, model), model, RolloutSpec(task, 0, 0, 0))


def row(output: Any, number: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """One row without its padding: prompt, response, mask, log-probabilities."""
    batch = output.batch
    width = batch["prompts"].shape[1]
    on = batch["attention_mask"][number].bool()
    prompt, response = batch["prompts"][number][on[:width]], batch["responses"][number][on[width:]]
    mask, logprobs = (batch[key][number][on[width:]] for key in ("response_mask", "rollout_log_probs"))
    return prompt.tolist(), response.tolist(), mask.tolist(), logprobs.tolist()


async def test_a_workflow_runs_in_verls_agent_loop_workers(cluster: Any, tmp_path: Path) -> None:
    """Ids, masks, log-probabilities and rewards in verl's batch are those of the workflow in Headrace."""
    inside = importlib.import_module("verl_inside")
    servers = importlib.import_module("verl.workers.rollout.llm_server")
    loops = importlib.import_module("verl.experimental.agent_loop.agent_loop")
    replicas = importlib.import_module("verl.workers.rollout.replica").RolloutReplicaRegistry
    replicas.register("bundled", lambda: inside.BundledReplica)
    engine, config = inside.PromptSeeded(), verl_config(tmp_path)
    manager = await servers.LLMServerManager.create(config)
    agents = await loops.AgentLoopManager.create(config, llm_client=manager.get_client())
    batch = batch_of(config, tmp_path, engine.backend.tokenizer)
    output = await agents.generate_sequences(batch)

    sent = [
        (tuple(prompt), ids, torch.tensor(logprobs, dtype=torch.float32).tolist())  # as verl's batch holds them
        for prompt, ids, logprobs in await manager.server_handles[0].made.remote()
    ]
    for number in range(8):
        question, twice = QUESTIONS[number // 2], number // 2 % 2 == 0
        episode = await in_headrace(inside.ask_twice if twice else inside.ask_once, question, engine)
        steps = episode.trajectories[0].steps
        (ours,) = merge_steps(episode.trajectories[0])
        prompt, response, mask, logprobs = row(output, number)
        assert [*prompt, *response] == list(ours.tokens)
        assert [0] * (len(prompt) - 1) + mask == list(ours.loss_mask) and len(steps) == (2 if twice else 1)
        assert logprobs == pytest.approx(list(ours.logprobs[len(prompt) - 1 :]), abs=1e-5)
        for step in steps:  # and to the bit those that the server sent
            start, size = len(step.prompt_ids) - len(prompt), len(step.response_ids)
            got = (step.prompt_ids, response[start : start + size], logprobs[start : start + size])
            assert got in sent
        reward = float(output.batch["rm_scores"][number].sum())
        assert reward == (episode.trajectories[0].final_reward if twice else float(episode.text.strip() == "5"))
    assert set(output.non_tensor_batch["__num_turns__"]) == {2, 4}
    assert set(output.non_tensor_batch["max_global_steps"]) == {3}
    await engine.close()

    updated_by_verl(cluster, config, output)


def updated_by_verl(ray: Any, config: Any, output: Any) -> None:
    """The rest of a step of verl's trainer: its log-probabilities, advantages and update, on one rank of its FSDP2."""
    trainer = importlib.import_module("verl.trainer.ppo.ray_trainer")
    dataclass = importlib.import_module("verl.utils.config").omega_conf_to_dataclass
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    actor = ray.remote(num_cpus=0)(importlib.import_module("verl_inside").Actor).remote(port)
    mask, rewards = output.batch["response_mask"].bool(), output.batch["rm_scores"]
    output.batch["token_level_rewards"] = rewards
    output = trainer.compute_advantage(output, trainer.AdvantageEstimator.GRPO)
    advantages = output.batch["advantages"]
    group = rewards.sum(-1)[[0, 1, 4, 5]]  # of the loop that asks twice
    assert float(advantages[0][0]) == pytest.approx(float((group[0] - group.mean()) / (group.std() + 1e-6)), abs=1e-4)

    tensors = output.select(non_tensor_batch_keys=[])
    tensors.meta_info = {"temperature": 1.0}
    old = tensors.batch["old_log_probs"] = ray.get(actor.logprobs.remote(tensors))
    sampled = tensors.batch["rollout_log_probs"]
    assert torch.allclose(old[mask], sampled[mask], atol=1e-4)  # verl reads the very tokens that were sampled
    metrics = ray.get(actor.update.remote(tensors, dataclass(config.actor_rollout_ref.actor)))
    new = ray.get(actor.logprobs.remote(tensors))
    assert metrics["grad_norm"] > 0
    assert float((advantages * (new - old))[mask].sum()) > 0  # what was better has become likelier
