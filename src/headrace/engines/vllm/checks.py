"""Whether a vLLM server can do what a run needs. Asked once, before the first request; says what is missing."""

from __future__ import annotations

import re
from typing import Any

from headrace.engines.servers.client import ServerClient, ServerRefusedError
from headrace.engines.servers.facts import ServerFacts
from headrace.errors import ConfigError

OLDEST = (0, 32)
_DEV = "start it with VLLM_SERVER_DEV_MODE=1"
_ROUTES = {"/pause": _DEV, "/resume": _DEV, "/update_weight_version": _DEV, "/weight_info": _DEV}
_TRANSFER = {"/start_weight_update": _DEV, "/update_weights": _DEV, "/finish_weight_update": _DEV}
_RPC = {"/collective_rpc": _DEV}
_SLEEP = {"/sleep": _DEV, "/wake_up": _DEV}
_LORA = {"/v1/load_lora_adapter": "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"}


async def inspect_server(client: ServerClient, transport: str, sleeps: bool, routed: bool = False) -> ServerFacts:
    """What the server is; ConfigError, with the remedy, if it lacks something."""
    url = client.url
    version = str((await client.get("/version")).get("version"))
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if len(found) == 2 and found < OLDEST:
        raise ConfigError(f"{url} runs vLLM {version}, and Headrace needs {'.'.join(map(str, OLDEST))} or newer")
    needed = {**_ROUTES, **({"disk": _RPC, "adapter": _LORA}.get(transport, _TRANSFER)), **(_SLEEP if sleeps else {})}
    routes = (await client.get("/openapi.json")).get("paths", {})
    for route, remedy in needed.items():
        if route not in routes:
            raise ConfigError(f"the vLLM server at {url} has no {route}; {remedy}")
    (model,) = (await client.get("/v1/models"))["data"][:1]
    world = int((await client.get("/get_world_size"))["world_size"]) if "/get_world_size" in routes else 1
    priorities = await _probe(client, model["id"], routed)
    return ServerFacts(model["id"], model.get("max_model_len"), world, priorities)


async def _probe(client: ServerClient, model: str, routed: bool) -> bool:
    """Sample one token, which has the probability 1 by top_k, and see what comes back. Whether priorities work."""
    body: dict[str, Any] = {
        "model": model,
        "token_ids": [0, 0],
        "sampling_params": {"temperature": 1.0, "top_k": 1, "max_tokens": 1, "logprobs": 0, "detokenize": False},
    }
    try:
        answer, priorities = await client.post("/inference/v1/generate", {**body, "priority": -1}), True
    except ServerRefusedError as refused:
        if refused.status == 403:
            raise ConfigError(f"{client.url} answers no token ids; start it with --enable-scale-out") from None
        if refused.status == 404:
            raise ConfigError(f"{client.url} has no /inference/v1/generate; use vLLM 0.32 or newer") from None
        answer, priorities = await client.post("/inference/v1/generate", body), False
    (choice,) = answer["choices"]
    if choice["logprobs"]["content"][0]["logprob"] < -1e-6:
        raise ConfigError(
            f"{client.url} returns log-probabilities that are not those of the distribution it samples from; start it "
            f"with --logprobs-mode processed_logprobs"
        )
    if not choice.get("weight_versions"):
        raise ConfigError(f"{client.url} does not say which weights sampled a token; use vLLM 0.32 or newer")
    if routed and not choice.get("routed_experts"):
        raise ConfigError(
            f"{client.url} does not return the experts that it routes tokens to, which backend.routing_replay needs; "
            f"start it with --enable-return-routed-experts, or set backend.routing_replay = false"
        )
    return priorities
