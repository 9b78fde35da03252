"""Whether an SGLang server can do what a run needs. Asked once, before the first request; says what is missing."""

from __future__ import annotations

import re
from typing import Any

from headrace.engines.servers.client import ServerClient, ServerRefusedError
from headrace.engines.servers.facts import ServerFacts
from headrace.errors import ConfigError

OLDEST = (0, 5)
_NEWER = "use a newer SGLang"
_ROUTES = ("/generate", "/pause_generation", "/continue_generation", "/update_weight_version", "/flush_cache")
_TRANSFER = {
    "disk": ("/update_weights_from_disk",),
    "nccl": ("/init_weights_update_group", "/update_weights_from_distributed"),
}
_SLEEP = ("/release_memory_occupation", "/resume_memory_occupation")


async def inspect_server(client: ServerClient, transport: str, sleeps: bool, routed: bool = False) -> ServerFacts:
    """What the server is; ConfigError, with the remedy, if it lacks something."""
    url = client.url
    about = await client.get("/server_info")
    version = str(about.get("version"))
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if len(found) == 2 and found < OLDEST:
        raise ConfigError(f"{url} runs SGLang {version}, and Headrace needs {'.'.join(map(str, OLDEST))} or newer")
    routes = (await client.get("/openapi.json")).get("paths", {})
    for route in (*_ROUTES, *_TRANSFER[transport], *(_SLEEP if sleeps else ())):
        if route not in routes:
            raise ConfigError(f"the SGLang server at {url} has no {route}; {_NEWER}")
    if sleeps and not about.get("enable_memory_saver"):
        raise ConfigError(f"{url} cannot give memory back; start it with --enable-memory-saver")
    if not about.get("enable_metrics"):
        raise ConfigError(f"{url} does not count its tokens; start it with --enable-metrics")
    if routed and not about.get("enable_return_routed_experts"):
        raise ConfigError(
            f"{url} does not return the experts that it routes tokens to, which backend.routing_replay needs; start it "
            f"with --enable-return-routed-experts, or set backend.routing_replay = false"
        )
    await _probe(client)
    world = int(about.get("tp_size") or 1) * int(about.get("pp_size") or 1) * int(about.get("dp_size") or 1)
    model = str((await client.get("/model_info")).get("served_model_name") or about.get("model_path"))
    return ServerFacts(model, about.get("context_length"), world, bool(about.get("enable_priority_scheduling")))


async def _probe(client: ServerClient) -> None:
    """Sample one token at a low temperature, and see whose log-probability comes back."""
    sampling = {"temperature": 0.02, "max_new_tokens": 8, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": [0, 0], "sampling_params": sampling, "return_logprob": True}
    try:
        answer = await client.post("/generate", body)
        logprobs = [float(logprob) for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    except ServerRefusedError as refused:
        raise ConfigError(f"{client.url} answers no token ids ({refused}); {_NEWER}") from None
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{client.url} returns no log-probabilities of what it samples; {_NEWER}") from None
    if "weight_version" not in answer["meta_info"]:
        raise ConfigError(f"{client.url} does not say which weights sampled a token; {_NEWER}")
    # of a distribution that is sharpened fifty times, the likeliest token has nearly all; of the model it has not
    if sum(logprobs) / len(logprobs) < -0.7:
        raise ConfigError(
            f"{client.url} returns log-probabilities that are not those of the distribution it samples from; start it "
            f"without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
