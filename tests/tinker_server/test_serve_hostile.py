"""`headrace serve tinker` and requests that are wrong, come twice, out of order, or without a key."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tinker
from test_serve_tinker import SGD_LIKE, client, imitation, new_model, row, sampled, serving, step, tokens
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

KEY = "tml-secret"
KIND = {"Content-Type": "application/json"}
HEADERS = {"X-API-Key": KEY, **KIND}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    words = ("--api-key", KEY, "--order-wait-s", "1", "--max-models", "24", "--rank-limit", "8", "--max-samplers", "2")
    limits = ("--session-timeout-s", "3", "--max-body-mb", "1")
    with serving(folder, *words, *limits) as found:
        yield found


@pytest.fixture(scope="module")
def service(url: str) -> Iterator[tinker.ServiceClient]:
    with client(url, KEY) as made, beating(url, made):
        yield made


class beating:
    """Heartbeats that are faster than the SDK's, as the server of these tests waits for seconds only."""

    def __init__(self, url: str, service: tinker.ServiceClient) -> None:
        self._url, self._id = url, service.holder.get_session_id()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._stop.wait(0.5):
            post(self._url, "session_heartbeat", {"session_id": self._id})

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def post(url: str, path: str, body: Any, **options: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(f"{url}/api/v1/{path}", content=content, **{"headers": HEADERS, "timeout": 30.0, **options})


def train_body(
    model_id: str, seq_id: int, data: list[types.Datum], loss: Any = "cross_entropy"
) -> pb.ForwardBackwardRequest:
    asked = types.ForwardBackwardInput(data=data, loss_fn=loss)
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=asked, model_id=model_id, seq_id=seq_id)
    )


def send(url: str, message: pb.ForwardBackwardRequest) -> httpx2.Response:
    return post(url, "forward_backward", message.SerializeToString())


def result(url: str, request_id: str) -> httpx2.Response:
    return post(url, "retrieve_future", {"request_id": request_id})


# ---- who may ask ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "tml-other"}, {"X-API-Key": "tml-é".encode("latin-1")}])
def test_without_the_key_nothing_is_answered(url: str, headers: dict[str, Any]) -> None:
    for path in ("create_session", "asample", "retrieve_future"):
        answer = post(url, path, {}, headers=headers)
        assert answer.status_code == 401 and "TINKER_API_KEY" in answer.json()["detail"]


def test_the_sdk_is_reported_a_wrong_key_at_once(url: str) -> None:
    began = time.monotonic()
    with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
        tinker.ServiceClient(base_url=url, api_key="tml-wrong").get_server_capabilities()
    assert time.monotonic() - began < 5


# ---- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datum", "loss", "sentence"),
    [
        (row([1, 2, 3], target_tokens=[1]), "cross_entropy", "target_tokens has shape"),
        (row([1, 2, 3], target_tokens=[1, 511]), "cross_entropy", "has the token 511"),
        (row([1, -2, 3]), "cross_entropy", "has the token -2"),
        (row([1, 2, 3], weights=[1.0]), "cross_entropy", "weights has shape"),
        (row([1, 2, 3], weights=[1.0, float("nan")]), "cross_entropy", "not finite"),
        (row([1, 2, 3], mask=np.ones(2, dtype=np.float32)), "cross_entropy", "has mask"),
        (row([1, 2, 3]), "ppo", "lacks advantages, logprobs"),
        (row([1, 2, 3], target_tokens=np.zeros((2, 2), dtype=np.int64)), "ppo", "lacks"),
        (row([3], target_tokens=[]), "cross_entropy", "no input tokens"),
        (row([4] * 1030), "cross_entropy", "at most 1024"),
        (row([1, 2, 3]), "custom", 'unknown loss "custom"'),
    ],
)
def test_bad_data_are_refused_with_a_sentence_and_the_model_continues(
    service: tinker.ServiceClient, datum: types.Datum, loss: Any, sentence: str
) -> None:
    model = new_model(service)
    with pytest.raises(tinker.BadRequestError, match=sentence):
        model.forward_backward([imitation(), datum], loss).result()
    with pytest.raises(tinker.RequestFailedError, match="no accumulated gradient"):
        model.optim_step(SGD_LIKE).result()  # nothing of the refused batch was taken
    model.forward_backward([imitation()], "cross_entropy").result()
    assert step(model, SGD_LIKE) > 0
    post(service.holder._base_url, "unload_model", {"model_id": model.model_id})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, 600]}, "has the token 600"),
        ({"prompt": [1] * 1024}, "no room"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"num_samples": 10**9}, "num_samples must be"),
        ({"params": {"temperature": -1}}, "temperature must be"),
        ({"params": {"temperature": 1e308}}, "temperature must be"),
        ({"params": {"max_tokens": 10**12}}, "max_tokens must be"),
        ({"params": {"top_p": 0}}, "top_p must be"),
        ({"params": {"top_k": -7}}, "top_k must be"),
        ({"params": {"max_tokens": 0}}, "max_tokens must be"),
        ({"params": {"stop": [5000]}}, "stop has the token 5000"),
        ({"params": {"stop": [""]}}, "not empty"),
        ({"params": {"max_tokens": "many"}}, "max_tokens"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs must be"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"sampling_session_id": "nobody"}, "no sampling session"),
        ({"model_path": "tinker://../../etc/weights/x"}, "no path of a checkpoint"),
        ({"model_path": "tinker://../weights/x"}, "cannot be called"),
        ({"model_path": "tinker://r/weights/x"}, "no checkpoint"),
        ({"base_model": "another"}, "model \"bundled\" only"),
        ({"prompt_alt_tokens_k": 3}, "does not offer"),
    ],
)  # fmt: skip
def test_bad_sample_requests_are_refused_with_a_sentence(url: str, given: dict[str, Any], sentence: str) -> None:
    fields = dict(given)
    prompt, params = fields.pop("prompt", [1, 2]), {"max_tokens": 2, **fields.pop("params", {})}
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}, "sampling_params": params,
        "base_model": "bundled", **fields,
    }  # fmt: skip
    answer = post(url, "asample", body)
    assert answer.status_code in (400, 404), answer.text
    assert sentence in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("asample", b"{", 400, "JSON"),
        ("asample", {}, 400, "prompt"),
        ("create_session", {"surprise": 1}, 400, "tags"),
        ("forward_backward", b"\xff\xff\xff", 400, "protobuf"),
        ("forward_backward", b"", 404, "not in memory"),
        ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {}}, 404, "not in memory"),
        ("optim_step", {"model_id": "../../x", "seq_id": 1, "adam_params": {}}, 404, "not in memory"),
        ("retrieve_future", {"request_id": "x"}, 404, "no request"),
        ("retrieve_future", {}, 400, "request_id"),
        ("session_heartbeat", {"session_id": "x"}, 410, "has ended"),
        ("weights_info", {"tinker_path": "file:///etc/passwd"}, 400, "no path of a checkpoint"),
        ("weights_info", {"tinker_path": 1}, 400, "tinker_path"),
        ("weights_info", b"[]", 400, "tinker_path"),
        ("cancel_future", {"request_id": "x"}, 204, ""),
        ("asample", b"x" * (2 << 20), 413, "max-body-mb"),
        ("no_such_thing", {}, 404, "has no POST"),
    ],
)
def test_nonsense_gets_a_status_that_is_not_retried(url: str, path: str, body: Any, status: int, sentence: str) -> None:
    answer = post(url, path, body)
    assert answer.status_code == status, answer.text
    assert not sentence or sentence in answer.json()["detail"]


def test_models_are_refused_beyond_the_limits(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="rank must be between 1 and 8"):
        service.create_lora_training_client("bundled", rank=32)
    with pytest.raises(tinker.BadRequestError, match='"bundled" only'):
        service.create_lora_training_client("another/model", rank=4)
    with pytest.raises(tinker.BadRequestError, match='"adamw" only'):
        service.create_lora_training_client("bundled", rank=4, optimizer=types.DimuonOptimizerConfig())


def test_adapters_of_another_shape_are_not_loaded(service: tinker.ServiceClient) -> None:
    path = new_model(service).save_state("four").result().path
    other = service.create_lora_training_client("bundled", rank=2)
    with pytest.raises(tinker.BadRequestError, match="create one like it"):
        other._load_state_impl(path, optimizer=False, weights_access_token=None).result()
    weights = other.save_weights_for_sampler("w").result().path
    with pytest.raises(tinker.RequestFailedError, match="no optimizer state"):
        other._load_state_impl(weights, optimizer=True, weights_access_token=None).result()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 300, "nul\0"])
def test_names_cannot_leave_the_folder(service: tinker.ServiceClient, url: str, name: str) -> None:
    model = new_model(service)
    if name:
        with pytest.raises(tinker.BadRequestError, match="cannot be called"):
            model.save_state(name).result()
    else:
        assert "/weights/unnamed-" in model.save_state(name).result().path
    post(url, "unload_model", {"model_id": model.model_id})


# ---- order, repetition, memory --------------------------------------------------------------------------------------


def test_requests_run_by_number_and_once(service: tinker.ServiceClient, url: str) -> None:
    model, twin = new_model(service), new_model(service)
    first, second = train_body(model.model_id, 1, [imitation()]), train_body(model.model_id, 2, [imitation()])
    late = [send(url, second).json(), send(url, second).json(), send(url, first).json(), send(url, first).json()]
    assert late[0] == late[1] != late[2] == late[3]
    params = {"model_id": model.model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.1, "eps": 1e3}}
    applied = post(url, "optim_step", params).json()["request_id"]
    norm = result(url, applied).json()["metrics"]["grad_norm"]
    assert result(url, applied).json()["metrics"]["grad_norm"] == norm, "a result can be fetched again"
    for number, message in enumerate((first, second), 1):
        message.model_id, message.seq_id = twin.model_id, number
        send(url, message)
    again = post(url, "optim_step", {**params, "model_id": twin.model_id}).json()["request_id"]
    assert result(url, again).json()["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    other = send(url, train_body(model.model_id, 2, [imitation()]))
    assert other.status_code == 400 and "another content" in other.json()["detail"]


def test_a_number_that_never_comes_fails_those_behind_it_and_no_more(service: tinker.ServiceClient, url: str) -> None:
    model = new_model(service)
    waiting = send(url, train_body(model.model_id, 2, [imitation()])).json()["request_id"]
    failed = result(url, waiting).json()
    assert "seq_id 1 of this model did not arrive within 1 s" in failed["error"] and failed["category"] == "server"
    late = send(url, train_body(model.model_id, 1, [imitation()]))
    assert late.status_code == 400 and "in the past" in late.json()["detail"]
    fine = send(url, train_body(model.model_id, 3, [imitation()])).json()["request_id"]
    assert result(url, fine).headers["content-type"] == "application/x-protobuf"


def test_a_batch_that_fails_half_way_leaves_no_gradient(service: tinker.ServiceClient) -> None:
    model = new_model(service)
    absurd = row(tokens(10), logprobs=[-1e30] * 9, advantages=[1e30] * 9)
    with pytest.raises(tinker.RequestFailedError, match="datum 1 is not finite"):
        model.forward_backward([sampled("ppo"), absurd], "importance_sampling").result()
    with pytest.raises(tinker.RequestFailedError, match="no accumulated gradient"):
        model.optim_step(SGD_LIKE).result()


def test_snapshots_that_were_pushed_out_say_so(service: tinker.ServiceClient) -> None:
    model = new_model(service)
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=2)
    samplers = [model.save_weights_and_get_sampling_client() for _ in range(3)]
    with pytest.raises(tinker.RequestFailedError, match="no longer kept"):
        samplers[0].sample(prompt, 1, params).result()
    for sampler in samplers[1:]:
        assert sampler.sample(prompt, 1, params).result().sequences


def test_a_cancelled_sample_stops_and_others_continue(url: str) -> None:
    def ask(count: int, length: int) -> str:
        params = {"max_tokens": length, "stop": []}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        body = {"prompt": prompt, "sampling_params": params, "base_model": "bundled", "num_samples": count}
        return post(url, "asample", body).json()["request_id"]

    long, short = ask(128, 1000), ask(1, 4)
    post(url, "cancel_future", {"request_id": long})
    assert "cancelled" in result(url, long).json()["error"]
    began = time.monotonic()
    assert result(url, short).headers["content-type"] == "application/x-protobuf"
    assert time.monotonic() - began < 5


def test_a_silent_session_ends_and_frees_its_models(url: str, service: tinker.ServiceClient) -> None:
    session = post(url, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}).json()["session_id"]
    lora = {"rank": 4}
    body = {"session_id": session, "model_seq_id": 0, "base_model": "bundled", "lora_config": lora}
    made = post(url, "create_model", body).json()
    assert post(url, "create_model", body).json() == made
    assert result(url, made["request_id"]).json()["model_id"] == made["model_id"]
    assert post(url, "get_info", {"model_id": made["model_id"]}).json()["lora_rank"] == 4
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = httpx2.get(f"{url}/api/v1/training_runs/{made['model_id']}", headers=HEADERS)
        if found.status_code == 404:
            break
        time.sleep(0.2)
    assert post(url, "get_info", {"model_id": made["model_id"]}).status_code == 404
    assert post(url, "session_heartbeat", {"session_id": session}).status_code == 410


def test_damaged_checkpoints_are_not_served(service: tinker.ServiceClient, folder: Path) -> None:
    path = new_model(service).save_weights_for_sampler("spoilt").result().path
    (file,) = folder.glob("*/sampler_weights/spoilt/weights.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    sampler = service.create_sampling_client(model_path=path)
    with pytest.raises(tinker.RequestFailedError, match="damaged"):
        sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
