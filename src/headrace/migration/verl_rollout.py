"""How a verl configuration samples and computes: rollouts, tool loops, engines, backend."""

from __future__ import annotations

from headrace.migration.carry import Carry

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = f"{_ACTOR}.fsdp_config"
TOOL_LOOP = "verl:verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop"


def carry_rollout(carry: Carry) -> None:
    carry.put(f"{_ROLLOUT}.n", "rollout.group_size", carry.get(f"{_ROLLOUT}.n", 1))
    carry.put(f"{_ROLLOUT}.temperature", "rollout.temperature", float(carry.get(f"{_ROLLOUT}.temperature", 1.0)))
    carry.put(f"{_ROLLOUT}.top_p", "rollout.top_p", float(carry.get(f"{_ROLLOUT}.top_p", 1.0)))
    carry.put(f"{_ROLLOUT}.top_k", "rollout.top_k", max(0, carry.get(f"{_ROLLOUT}.top_k", -1)))
    prompt = carry.get(f"{_ROLLOUT}.prompt_length", carry.get("data.max_prompt_length", 512))
    response = carry.get(f"{_ROLLOUT}.response_length", carry.get("data.max_response_length", 512))
    for key in (f"{_ROLLOUT}.response_length", "data.max_response_length"):
        carry.put(key, "rollout.max_tokens", response, "of each reply")
    length = carry.get(f"{_ROLLOUT}.max_model_len") or prompt + response
    for key in (f"{_ROLLOUT}.prompt_length", "data.max_prompt_length", f"{_ROLLOUT}.max_model_len"):
        carry.put(key, "engine.max_model_length", length, "prompt and response together")
    loop = carry.get(f"{_ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    if carry.get(f"{_ROLLOUT}.multi_turn.enable", False) or loop == "tool_agent":
        _tool_loop(carry)
    elif loop == "single_turn_agent":
        carry.put(f"{_ROLLOUT}.agent.default_agent_loop", "workflow.name", "single_turn")
    else:
        carry.lose(f"{_ROLLOUT}.agent.default_agent_loop", 'name its class: workflow.name = "verl:module:Class"')
        carry.open.append(f'workflow.name: agent loop {loop!r} is your own; name its class, "verl:module:Class"')


def _tool_loop(carry: Carry) -> None:
    """verl's own loop runs here unchanged; its settings are given to it as overrides."""
    at = f"{_ROLLOUT}.multi_turn"
    carry.values["workflow.name"] = TOOL_LOOP
    carry.part_of(f"{at}.enable", "workflow.name", "rows may name another loop there (agent_name), here all have one")
    carry.part_of(f"{_ROLLOUT}.agent.default_agent_loop", "workflow.name")
    usual = {
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
    }
    overrides = [
        f"data.{name}={carry.get(f'data.{name}', 512)}" for name in ("max_prompt_length", "max_response_length")
    ]
    for key in ("tool_config_path", "function_tool_path", "max_assistant_turns", "max_user_turns", *usual):
        value = carry.get(f"{at}.{key}")
        if value is not None and value != usual.get(key):
            overrides.append(f"{at}.{key}={value}")
            carry.part_of(f"{at}.{key}", "workflow.args.overrides")
        elif value is not None:
            carry.as_here(f"{at}.{key}", "the loop's own default")
    carry.values["workflow.args"] = {"overrides": overrides}


def carry_engine(carry: Carry) -> None:
    name = carry.get(f"{_ROLLOUT}.name")
    if name not in ("vllm", "sglang"):
        carry.lose(f"{_ROLLOUT}.name", 'engines are "torch", "vllm" and "sglang"')
        carry.open.append(f"engine.name: there is no engine {name!r}; choose one")
        return
    carry.put(f"{_ROLLOUT}.name", "engine.name", name)
    flags = {
        "tensor_model_parallel_size": {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"},
        "gpu_memory_utilization": {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"},
        "max_num_batched_tokens": {"vllm": "--max-num-batched-tokens", "sglang": "--max-prefill-tokens"},
    }
    made: list[str] = []
    for key, names in flags.items():
        if (value := carry.get(f"{_ROLLOUT}.{key}")) is not None:
            made += [names[name], str(value)]
            carry.part_of(f"{_ROLLOUT}.{key}", "engine.server_args", names[name])
    if carry.get(f"{_ROLLOUT}.enforce_eager", False):
        made.append({"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"}[name])
        carry.part_of(f"{_ROLLOUT}.enforce_eager", "engine.server_args", made[-1])
    carry.values["engine.server_args"] = made
    if (most := carry.get(f"{_ROLLOUT}.max_num_seqs")) is not None:
        carry.put(f"{_ROLLOUT}.max_num_seqs", "engine.max_batch", most)


def carry_backend(carry: Carry) -> None:
    ranks = carry.get("trainer.nnodes", 1) * carry.get("trainer.n_gpus_per_node", 8)
    strategy = carry.get(f"{_ACTOR}.strategy", "fsdp")
    rows = carry.get(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    length = carry.values["engine.max_model_length"]
    tokens = carry.get(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384)
    if carry.get(f"{_ACTOR}.use_dynamic_bsz", False) or rows is None:
        carry.put(f"{_ACTOR}.ppo_max_token_len_per_gpu", "backend.micro_batch_tokens", tokens)
        carry.part_of(f"{_ACTOR}.use_dynamic_bsz", "backend.micro_batch_tokens", "micro-batches are packed by tokens")
    else:
        carry.put(
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "backend.micro_batch_tokens", rows * length,
            "rows of full length; micro-batches are packed by tokens",
        )  # fmt: skip
    carry.values["backend.name"] = "fsdp" if ranks > 1 else "local"
    if strategy in ("fsdp", "fsdp2"):
        carry.part_of(f"{_ACTOR}.strategy", "backend.name")
    else:
        carry.lose(f"{_ACTOR}.strategy", "backend fsdp instead, which shards as FSDP2 does")
        carry.open.append(f"backend.name: {_ACTOR}.strategy = {strategy!r} became backend fsdp; check that it fits")
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node"):
        carry.part_of(key, "backend.ranks")
    if ranks > 1:
        carry.values["backend.ranks"] = ranks
        if carry.get("trainer.nnodes", 1) > 1:
            carry.values["cluster.address"] = "auto"
        if (size := carry.get(f"{_FSDP}.fsdp_size", -1)) != -1:
            carry.put(f"{_FSDP}.fsdp_size", "backend.shard", size)
        else:
            carry.as_here(f"{_FSDP}.fsdp_size", "backend.shard = 0: all ranks")
        offload = bool(carry.get(f"{_FSDP}.param_offload", False))
        carry.put(f"{_FSDP}.param_offload", "backend.cpu_offload", offload)
    if not carry.values.get("backend.cpu_offload"):
        offload = bool(carry.get(f"{_FSDP}.optimizer_offload", False))
        if offload and ranks > 1:
            carry.lose(f"{_FSDP}.optimizer_offload", "backend.cpu_offload = true keeps all that ranks hold on the host")
        else:
            carry.put(f"{_FSDP}.optimizer_offload", "optimizer.offload", offload)
    else:
        carry.part_of(f"{_FSDP}.optimizer_offload", "backend.cpu_offload")
