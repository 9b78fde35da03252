"""`headrace serve tinker` in this process: what a session leaves behind, and values that nobody means."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tinker import types

from headrace.tinker_server.app import Routes
from headrace.tinker_server.checkpoint_store import moment
from headrace.tinker_server.checks import check_ttl
from headrace.tinker_server.options import Refusal, ServeOptions
from headrace.tinker_server.service import Service

RETRIED = (408, 409, 429)  # and 5xx: for five minutes


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(ServeOptions(folder=tmp_path, max_sessions=3, max_models=2))
    yield made
    await made.close()


def new_session(service: Service) -> str:
    return service.create_session(types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0"))[
        "session_id"
    ]


def begin_model(service: Service, session: str) -> dict[str, Any]:
    lora = types.LoraConfig(rank=4)
    request = types.CreateModelRequest(session_id=session, model_seq_id=0, base_model="bundled", lora_config=lora)
    return service.create_model(request, b"create")


async def new_model(service: Service, session: str) -> str:
    begun = begin_model(service, session)
    assert await service.outcome(begun["request_id"], 30)
    return begun["model_id"]


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_that_is_silent_for_a_minute_ends() -> None:
    assert ServeOptions().session_timeout_s <= 60  # six heartbeats of the SDK


async def test_the_end_of_a_session_frees_its_models_and_samplers(service: Service) -> None:
    session = new_session(service)
    model = await new_model(service, session)
    saving = types.SaveWeightsForSamplerRequest(model_id=model, path="kept", seq_id=1)
    saved = service.save_for_sampler(saving, b"save")
    path = json.loads((await service.outcome(saved["request_id"], 30)).body)["path"]  # type: ignore[union-attr]
    asked = types.CreateSamplingSessionRequest(session_id=session, sampling_session_seq_id=0, model_path=path)
    service.create_sampling_session(asked)
    held = [weakref.ref(service.models[model].trained), weakref.ref(await service.samplers.lane(path))]
    service.end_session(session)
    await asyncio.sleep(0)
    gc.collect()
    assert [one() for one in held] == [None, None]
    assert not service.models and not service.sampling and not service.sessions


async def test_weights_that_another_session_samples_from_stay(service: Service) -> None:
    first, second = new_session(service), new_session(service)
    saving = types.SaveWeightsForSamplerRequest(model_id=await new_model(service, first), path="kept", seq_id=1)
    saved = service.save_for_sampler(saving, b"save")
    path = json.loads((await service.outcome(saved["request_id"], 30)).body)["path"]  # type: ignore[union-attr]
    for session in (first, second):
        asked = types.CreateSamplingSessionRequest(session_id=session, sampling_session_seq_id=0, model_path=path)
        service.create_sampling_session(asked)
    lane = await service.samplers.lane(path)
    service.end_session(first)
    assert await service.samplers.lane(path) is lane


async def test_a_session_that_ends_at_once_leaves_room_for_models(service: Service) -> None:
    for _ in range(3):
        session = new_session(service)
        begin_model(service, session)
        service.end_session(session)  # before its model was begun
        await asyncio.sleep(0)
    assert await new_model(service, new_session(service))


async def test_there_is_a_cap_on_sessions(service: Service) -> None:
    for _ in range(3):
        new_session(service)
    with pytest.raises(Refusal, match="--max-sessions") as refused:
        new_session(service)
    assert refused.value.status == 400


async def test_time_for_which_the_server_itself_was_held_up_ends_no_session(service: Service) -> None:
    session, silent = new_session(service), new_session(service)
    now = time.monotonic()
    service.sessions[session].seen, service.sessions[silent].seen = now - 100, now - 500
    assert service.end_silent_sessions(held_up_s=90) == [silent]
    service.sessions[session].seen = now - 100
    assert service.end_silent_sessions() == [session]


async def test_who_waits_for_a_result_is_alive(service: Service) -> None:
    session = new_session(service)
    begun = begin_model(service, session)
    service.sessions[session].seen -= 1000
    await service.outcome(begun["request_id"], 30)
    assert service.end_silent_sessions() == []


# ---- values that nobody means ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl_s", [0, -1, 3599, 10**10, 10**300])
def test_an_absurd_life_is_refused(ttl_s: int) -> None:
    with pytest.raises(Refusal, match="ttl_seconds must be between") as refused:
        check_ttl(ttl_s)
    assert refused.value.status == 400 and len(str(refused.value)) < 300


def test_a_moment_beyond_all_calendars_can_be_shown() -> None:
    assert moment(1e300).startswith("9999-")


ABSURD = [
    -1,
    2**31,
    2**63,
    2**64,
    10**300,
    -(10**300),
    1e308,
    True,
    None,
    "",
    "\x00",
    "x" * 70_000,
    "../..",
    [],
    [[]],
    {},
]
BODIES: dict[str, dict[str, Any]] = {
    "create_session": {"tags": [], "user_metadata": None, "sdk_version": "0"},
    "session_heartbeat": {"session_id": "SESSION"},
    "create_model": {"session_id": "SESSION", "model_seq_id": 5, "base_model": "bundled", "lora_config": {"rank": 2}},
    "optim_step": {"model_id": "MODEL", "seq_id": 1, "adam_params": {"learning_rate": 0.1}},
    "save_weights": {"model_id": "MODEL", "seq_id": 1, "path": "p", "ttl_seconds": 4000},
    "save_weights_for_sampler": {"model_id": "MODEL", "seq_id": 1, "path": "p", "ttl_seconds": 4000},
    "load_weights": {"model_id": "MODEL", "seq_id": 1, "path": "tinker://r/weights/p", "optimizer": True},
    "create_sampling_session": {"session_id": "SESSION", "sampling_session_seq_id": 1, "base_model": "bundled"},
    "asample": {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "base_model": "bundled", "num_samples": 1,
        "sampling_params": {"max_tokens": 1, "seed": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": []},
        "topk_prompt_logprobs": 0,
    },
    "retrieve_future": {"request_id": "x"},
    "cancel_future": {"request_id": "x"},
    "get_info": {"model_id": "MODEL"},
    "weights_info": {"tinker_path": "tinker://r/weights/p"},
}  # fmt: skip


def changed(body: Any) -> list[Any]:
    """The body with each of its values, at any depth, replaced by each absurd one."""
    if isinstance(body, dict):
        return [{**body, name: one} for name, value in body.items() for one in (*ABSURD, *changed(value))]
    return [[one, *body[1:]] for one in (*ABSURD, *changed(body[0]))] if isinstance(body, list) and body else []


@pytest.mark.parametrize("path", BODIES)
async def test_an_absurd_value_is_never_the_servers_failure(service: Service, path: str) -> None:
    session = new_session(service)
    model = await new_model(service, session)
    service.options = ServeOptions(folder=service.options.folder, max_sessions=10**6, max_models=4)
    transport = httpx2.ASGITransport(Routes(service).app())
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost/api/v1/") as client:
        for body in changed(BODIES[path]):
            text = json.dumps(body).replace("SESSION", session).replace("MODEL", model)
            answer = await client.post(path, content=text)
            assert answer.status_code < 500 and answer.status_code not in RETRIED, (text[:300], answer.text[:300])


@pytest.mark.parametrize("ttl", ["0", "-1", "1e3", "true", '"x"', "1" * 300, "9" * 5000, "[]", "1e400"])
async def test_an_absurd_life_of_a_checkpoint_is_refused_at_its_route(service: Service, ttl: str) -> None:
    transport = httpx2.ASGITransport(Routes(service).app())
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost/api/v1/") as client:
        answer = await client.put("training_runs/r/checkpoints/weights/p/ttl", content=f'{{"ttl_seconds": {ttl}}}')
    assert answer.status_code == 400 and "ttl_seconds" in answer.json()["detail"]
