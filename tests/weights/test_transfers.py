"""Transfers to servers: checksums, what receivers report, and the calls of the transports that need GPUs."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fake_server import Answer, Received, serving
from headrace.errors import ConfigError, ServerLostError, WeightSyncError
from headrace.weights.base import Endpoint
from headrace.weights.control import call
from headrace.weights.source import NamedTensors
from headrace.weights.transfers.adapter import AdapterTransfer
from headrace.weights.transfers.file import FileTransfer
from headrace.weights.transfers.ipc import IpcTransfer
from headrace.weights.transfers.nccl import NcclTransfer
from headrace.weights.transfers.receipts import compare_receipts
from headrace.weights.vllm_plugin.headrace_vllm.checksum import checksum

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(5, dtype=torch.bfloat16)}


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=70), st.data())
def test_a_checksum_changes_with_any_byte(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.uint8)
    at = data.draw(st.integers(0, len(values) - 1))
    changed = tensor.clone()
    changed[at] += data.draw(st.integers(1, 255))
    assert checksum(tensor) != checksum(changed) and checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(torch.cat([tensor, torch.zeros(1, dtype=torch.uint8)]))


def test_a_checksum_is_of_the_content_not_of_where_it_lies() -> None:
    whole = torch.randn(1000)
    view = whole[3:503]  # not aligned to eight bytes
    assert checksum(view) == checksum(view.clone())
    assert checksum(whole.reshape(10, 100).T) == checksum(whole.reshape(10, 100).T.contiguous())


def test_what_did_not_arrive_is_named() -> None:
    names = [f"layer.{i}" for i in range(9)]
    sent = list(range(9))
    assert compare_receipts(names, sent, sent, "there") == compare_receipts(names, sent, sent, "elsewhere")
    with pytest.raises(WeightSyncError, match=r"5 of 9 tensors did not arrive at there .* layer.0, .* and 2 more"):
        compare_receipts(names, sent, [-1] * 5 + sent[5:], "there")


def test_chunks_hold_all_tensors_in_order() -> None:
    tensors = {f"t{i}": torch.zeros(10 * (i + 1)) for i in range(6)}
    stream = NamedTensors(tensors)
    for most in (1, 100, 10_000):
        chunks = list(stream.chunks(most))
        assert [name for chunk in chunks for name, _ in chunk] == list(tensors)
        assert all(len(chunk) == 1 or sum(t.nbytes for _, t in chunk) <= most for chunk in chunks)
    assert [(i.name, i.dtype, i.shape, i.nbytes) for i in stream.infos()][:1] == [("t0", "float32", (10,), 40)]


def test_the_file_of_weights_is_read_by_others_and_gone_with_its_owner() -> None:
    transfer = FileTransfer()
    script = "import os, sys; file = os.open(sys.argv[1], os.O_RDWR); print(os.pread(file, 24, 0).hex())"
    read: list[bytes] = []

    def answer(asked: Received) -> Answer:
        if asked.path == "/update_weights":
            info = asked.body["update_info"]
            done = subprocess.run([sys.executable, "-c", script, info["path"]], capture_output=True, text=True)
            read.append(bytes.fromhex(done.stdout.strip()))
            with open(info["path"], "r+b") as file:  # a receiver that takes everything
                file.seek(info["receipts"])
                file.write(np.array([checksum(tensor) for tensor in TENSORS.values()]).tobytes())
        return Answer({})

    with serving(answer) as server:
        transfer.open([Endpoint(server.url)])
        assert transfer.send(NamedTensors(TENSORS), 1) == transfer.send(NamedTensors(TENSORS), 2)
        path = server.asked[1].body["update_info"]["path"]
    assert read == [TENSORS["a.weight"].numpy().tobytes()] * 2
    assert Path(path).exists()
    transfer.close()
    assert not Path(path).exists()


class Broadcasts:
    """The sender's end of a group, which notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.alive = True

    def broadcast(self, tensor: Tensor) -> None:
        self.sent.append(tensor.clone())

    def synchronize(self) -> None: ...

    def destroy(self) -> None:
        self.alive = False


class NcclWithoutGpus(NcclTransfer):
    """All but the library: the group meets when the server has been asked to join."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Broadcasts] = []
        self.asked = threading.Event()

    def new_id(self) -> bytes:
        return bytes(range(128))

    def join(self, unique: bytes, size: int) -> Broadcasts:
        assert self.asked.wait(5), "the server must be asked before we join: both wait for each other"
        self.groups.append(Broadcasts())
        return self.groups[-1]


def test_nccl_meets_by_an_id_and_broadcasts_in_order() -> None:
    transfer = NcclWithoutGpus()

    def answer(asked: Received) -> Answer:
        if asked.path == "/init_weight_transfer_engine":
            transfer.asked.set()
        return Answer({})

    with serving(answer) as server:
        endpoint = Endpoint(server.url, world_size=2)
        for version in (1, 2):
            transfer.open([endpoint])
            assert transfer.send(NamedTensors(TENSORS), version) is None
        again = Endpoint(server.url, world_size=2, incarnation=1)
        transfer.open([again])  # a restarted server needs a new group
        paths = [one.path for one in server.asked]
        info = server.asked[0].body["init_info"]
        update = server.asked[1].body["update_info"]
    assert paths == [
        "/init_weight_transfer_engine",
        "/update_weights",
        "/update_weights",
        "/init_weight_transfer_engine",
    ]
    assert base64.b64decode(info["nccl_unique_id_b64"]) == bytes(range(128))
    assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 3, False)
    assert update == {
        "names": ["a.weight", "b.weight"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [5]],
    }  # fmt: skip
    first, second = transfer.groups
    assert len(first.sent) == 4 and not first.alive and second.alive
    assert all(torch.equal(a, b) for a, b in zip(first.sent, TENSORS.values(), strict=False))


class IpcWithoutGpus(IpcTransfer):
    def handle(self, tensor: Tensor) -> dict[str, tuple[Any, ...]]:
        return {"GPU-1": (tensor.data_ptr(), tuple(tensor.shape))}

    def synchronize(self) -> None: ...


def test_ipc_sends_handles_by_gpu() -> None:
    transfer = IpcWithoutGpus()
    with serving(lambda _: Answer({})) as server:
        transfer.open([Endpoint(server.url)])
        transfer.send(NamedTensors(TENSORS), 1)
        (joined, update) = server.asked
    assert joined.body == {"init_info": {"packed": False}}
    handles = pickle.loads(base64.b64decode(update.body["update_info"]["ipc_handles_pickled"]))
    assert [handle["GPU-1"][1] for handle in handles] == [(2, 3), (5,)]


def test_ipc_refuses_a_server_of_several_workers_and_a_learner_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r'set engine.transport = "nccl"'):
        IpcTransfer().open([Endpoint("http://127.0.0.1:1", world_size=2)])
    with pytest.raises(ConfigError, match="needs the learner on a GPU"):
        IpcTransfer().handle(torch.ones(1))


def test_adapters_are_written_as_peft_writes_them_and_loaded_under_a_new_name(tmp_path: Path) -> None:
    name = "base_model.model.layers.0.q_proj.lora_A.default.weight"
    loaded: list[str] = []

    def answer(asked: Received) -> Answer:
        if asked.path == "/v1/load_lora_adapter" and asked.body["lora_name"] in loaded:
            return Answer({"error": {"message": "has already been loaded"}}, 400)
        loaded.append(asked.body["lora_name"]) if "unload" not in asked.path else loaded.remove(asked.body["lora_name"])
        return Answer("Success", headers={"Content-Type": "text/plain"})

    transfer = AdapterTransfer({"r": 4, "lora_alpha": 8}, tmp_path)
    with serving(answer) as server:
        transfer.open([Endpoint(server.url)])
        for version in (1, 1, 2):  # the first attempt at version 1 was given up
            transfer.send(NamedTensors({name: torch.ones(4, 3)}), version)
    assert loaded == ["policy-v1", "policy-v2"]
    from safetensors.torch import load_file

    assert list(load_file(tmp_path / "policy-v2" / "adapter_model.safetensors")) == [name.replace(".default", "")]
    assert json.loads((tmp_path / "policy-v2" / "adapter_config.json").read_text()) == {"r": 4, "lora_alpha": 8}


def test_a_server_that_is_not_there_is_lost_and_one_that_refuses_is_not() -> None:
    with pytest.raises(ServerLostError, match="gave no answer"):
        call(Endpoint("http://127.0.0.1:9"), "/pause", timeout_s=2)
    with (
        serving(lambda asked: Answer({}, 200 if asked.path == "/health" else 500)) as server,
        pytest.raises(WeightSyncError, match="answered 500"),
    ):
        call(Endpoint(server.url), "/update_weights")
    with (
        serving(lambda asked: Answer({}, 503 if asked.path == "/health" else 500)) as server,
        pytest.raises(ServerLostError, match="answered 500"),  # its engine died under it
    ):
        call(Endpoint(server.url), "/update_weights")
