"""Parts of the Tinker server on their own: promises, order, checkpoints, options, wire."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.response_conv import deserialize_forward_backward_output

from headrace.errors import CheckpointError, ConfigError
from headrace.tinker_server.base import LoraShape
from headrace.tinker_server.checkpoint_store import CheckpointPath, Store
from headrace.tinker_server.options import Refusal, ServeOptions
from headrace.tinker_server.promises import Promise, Promises, RequestQueue
from headrace.tinker_server.wire import Outcome, _read_tensor, train_outcome

SHAPE = LoraShape(4)


def add(promises: Promises, name: str, size: int = 0, log: list[str] | None = None) -> Promise:
    async def work() -> Outcome:
        await asyncio.sleep(0)
        if log is not None:
            log.append(name)
        return Outcome(b"x" * size)

    return promises.add(name, "session", "digest", work)


async def test_results_beyond_the_bound_are_dropped_those_first_that_were_fetched() -> None:
    promises = Promises(3 * 10_000)
    for name in ("a", "b", "c"):
        await promises.run(add(promises, name, 5_000))
    assert await promises.wait("b", 1)
    for name in ("d", "e"):
        await promises.run(add(promises, name, 5_000))
    with pytest.raises(Refusal, match="no longer kept") as gone:
        await promises.wait("b", 1)
    assert gone.value.status == 410
    for name in ("a", "c", "d", "e"):
        assert await promises.wait(name, 1)


async def test_a_result_is_waited_for_no_longer_than_asked() -> None:
    promises = Promises(1000)
    add(promises, "never")
    assert await promises.wait("never", 0.01) is None


async def test_the_end_of_a_session_reaches_those_who_wait() -> None:
    promises = Promises(1000)
    add(promises, "never")
    waiting = asyncio.create_task(promises.wait("never", 10))
    await asyncio.sleep(0)
    promises.drop_session("session")
    outcome = await waiting
    assert outcome is not None and "session has ended" in json.loads(outcome.body)["error"]


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 3, 2, 1), (3, 1, 4, 2)])
async def test_a_line_runs_by_number(order: tuple[int, ...]) -> None:
    promises, log = Promises(10**6), []
    queue = RequestQueue(promises, wait_s=5)
    for number in order:
        queue.add(number, None if number == 3 else add(promises, str(number), log=log))
    await promises.wait("4", 5)
    queue.close()
    assert log == ["1", "2", "4"], "3 was refused, and its number is used up"


async def test_a_closed_line_fails_what_waits() -> None:
    promises = Promises(10**6)
    queue = RequestQueue(promises, wait_s=5)
    queue.add(2, add(promises, "2"))
    queue.close()
    outcome = await promises.wait("2", 1)
    assert outcome is not None and "unloaded" in json.loads(outcome.body)["error"]


def test_checkpoints_come_back_expire_and_are_replaced_atomically(tmp_path: Path) -> None:
    store, path = Store(tmp_path), CheckpointPath.parse("tinker://run:train:0/weights/a")
    held = {"weights": {"w": torch.arange(3.0)}, "optimizer": {"w/step": torch.tensor(2.0)}}
    store.write(path, "bundled", SHAPE, held)
    with pytest.raises(Refusal, match="exists"):
        store.write(path, "bundled", SHAPE, held)
    store.write(path, "bundled", SHAPE, {"weights": {"w": torch.ones(3)}}, overwrite=True)
    assert store.read(path)["weights"]["w"].tolist() == [1, 1, 1]
    with pytest.raises(Refusal, match="no optimizer state"):
        store.read(path, optimizer=True)
    store.expire(path, 0.01)
    time.sleep(0.02)
    assert store.notes() == []
    with pytest.raises(Refusal, match="no checkpoint"):
        store.note(path)
    assert [leftover.name for leftover in tmp_path.glob(".*")] == []


def test_a_note_that_cannot_be_read_names_its_checkpoint(tmp_path: Path) -> None:
    store, path = Store(tmp_path), CheckpointPath("run", "weights", "a")
    store.write(path, "bundled", SHAPE, {"weights": {"w": torch.ones(1)}})
    (tmp_path / "run" / "weights" / "a" / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="tinker://run/weights/a is damaged"):
        store.note(path)
    assert store.notes() == []
    store.delete(path)
    with pytest.raises(Refusal, match="no checkpoint"):
        store.delete(path)


def test_a_kill_while_a_checkpoint_is_replaced_keeps_the_old_one(tmp_path: Path) -> None:
    path = CheckpointPath("run", "weights", "a")
    Store(tmp_path).write(path, "bundled", SHAPE, {"weights": {"w": torch.ones(1)}})
    place = tmp_path / "run" / "weights" / "a"
    place.rename(place.with_name(".a.replaced"))
    assert Store(tmp_path).read(path)["weights"]["w"].tolist() == [1]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"host": "0.0.0.0"}, "no API key is set"),
        ({"host": "example.org"}, "no API key is set"),
        ({"api_key": "secret"}, 'must start with "tml-"'),
        ({"max_models": 0}, "--max-models must be above 0"),
        ({"port": 70000}, "--port must be"),
    ],
)
def test_wrong_options_are_reported_before_anything_is_loaded(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ServeOptions(**given)  # type: ignore[arg-type]
    ServeOptions(host="0.0.0.0", api_key="tml-1")
    ServeOptions(host="::1")


def test_outputs_of_different_widths_keep_their_shapes() -> None:
    arrays = [np.ones(3), np.zeros((2, 4)), np.full((1, 4), 2.0), np.ones(5)]
    read = deserialize_forward_backward_output(train_outcome(arrays, {"loss:sum": 1.5}).body)
    assert [output["logprobs"].shape for output in read.loss_fn_outputs] == [[3], [2, 4], [1, 4], [5]]
    assert read.metrics == {"loss:sum": 1.5}


def sparse(starts: list[int], columns: list[int], values: list[float], shape: list[int]) -> pb.Tensor:
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape)
    message.sparse_csr.values = np.array(values, dtype=np.float32).tobytes()
    message.sparse_csr.crow_indices = np.array(starts, dtype=np.int64).tobytes()
    message.sparse_csr.col_indices = np.array(columns, dtype=np.int64).tobytes()
    return message


def test_sparse_tensors_are_read() -> None:
    found = _read_tensor(sparse([0, 1, 1, 3], [1, 0, 1], [5, 6, 7], [3, 2]), "weights")
    assert found.tolist() == [[0, 5], [0, 0], [6, 7]]


@pytest.mark.parametrize(
    "message",
    [
        sparse([0, 1], [9], [1], [1, 2]),
        sparse([0, 5], [0], [1], [1, 2]),
        sparse([0, -1, 1], [0], [1], [2, 2]),
        sparse([0, 1], [0], [1], [1]),
        sparse([0] + [0] * 2**16, [], [], [2**16, 2**16]),
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=b"123"),
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=b"1234", shape=[7]),
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=b"1234", shape=[-1]),
        pb.Tensor(dense=b"1234"),
    ],
)
def test_broken_tensors_are_refused(message: pb.Tensor) -> None:
    with pytest.raises(Refusal, match="weights"):
        _read_tensor(message, "weights")
