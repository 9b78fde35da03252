"""The engine process: being killed, weight syncs while decoding, all kinds of models, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from contracts.engine_harness import soon, submitted, under_way, until
from fork_server import ForkServer, is_running
from headrace.config import LoraSection, ModelSection
from headrace.engines.base import Generation, SamplingParams
from headrace.engines.process.child import Child, Launch, launch_engine
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.engines.torch.engine import TorchEngine
from headrace.errors import EngineError, WeightSyncError
from headrace.models.causal import build_causal_model
from headrace.models.load import load_model
from headrace.models.modules import trained_parameters
from headrace.weights.digest import weight_digest
from headrace.weights.in_place import InPlace
from headrace.weights.shared_memory import BoundModels, SharedWeights
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync

LONG = SamplingParams(max_tokens=200)


class Engine(ProcessEngine):
    """With the model of its learner at hand."""

    def __init__(self, learner: Any, options: EngineOptions, launch: Launch) -> None:
        source = ModelWeights(learner)
        super().__init__(SharedWeights(source), options, launch)
        self.learner = learner
        self.weight_sync = WeightSync(source, self._weights, self)

    async def sync(self, version: int) -> str:
        """Sync the learner's weights as they are now; their digest."""
        return (await soon(self.weight_sync.sync(version))).digest


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelSection:
    return ModelSection(name=str(tiny.saved_model("llama", tmp_path_factory.mktemp("llama"))))


@pytest.fixture
async def make(forks: ForkServer, llama: ModelSection) -> AsyncIterator[Make]:
    """Engines that are closed at the end of the test; `learner` is of another folder than the engine's, if given."""
    torch.set_num_threads(1)
    engines: list[Engine] = []

    def make(
        section: ModelSection = llama, launch: Launch = forks.launch, learner: Any = None, **options: Any
    ) -> Engine:
        learner = load_model(section) if learner is None else learner
        build_causal_model(learner, section.fast_path)
        engines.append(Engine(learner, EngineOptions(section, health_every_s=0.001, **options), launch))
        return engines[-1]

    yield make
    for engine in engines:
        await soon(engine.close())


def asked(engine: Any, count: int, params: SamplingParams = LONG, **options: Any) -> list[asyncio.Future[Generation]]:
    """Requests for many prompts, each with its own seed."""
    rows = tiny.random_rows(*(1 + i % 9 for i in range(count)))
    return [asyncio.ensure_future(engine.generate(row, params, i, **options)) for i, row in enumerate(rows)]


async def answers(tasks: list[asyncio.Future[Generation]]) -> list[tuple[int, ...]]:
    return [made.completion_ids for made in await soon(asyncio.gather(*tasks))]


def kill(engine: ProcessEngine) -> None:
    os.kill(engine.pid, signal.SIGKILL)


# ---- being killed -------------------------------------------------------------------------------------------------


async def test_requests_survive_the_death_of_the_process(make: Make, caplog: Any) -> None:
    engine = make(max_batch=4)
    undisturbed = await answers(asked(engine, 10))
    tasks = asked(engine, 10)
    await submitted(engine, 10)
    await until(lambda: engine.health().running > 0)
    first = engine.pid
    kill(engine)
    assert await answers(tasks) == undisturbed
    assert engine.pid != first and not is_running(first)
    assert engine.health().restarts == 1 and engine.health().alive
    assert f"the engine process {first} died (killed by SIGKILL)" in caplog.text


async def test_what_was_synced_pinned_and_paused_survives_too(make: Make) -> None:
    engine = make()
    old = await answers(asked(engine, 3))
    await engine.sync(1)
    await soon(engine.pin())
    tiny.randomise(engine.learner, seed=5)
    await engine.sync(2)
    new = await answers(asked(engine, 3))
    tiny.randomise(engine.learner, seed=6)  # what was not synced must not show
    tasks = asked(engine, 3, pinned=True)
    await submitted(engine, 3)
    await under_way(engine, 5)
    generated = engine.health().generated_tokens
    kill(engine)
    late = asked(engine, 3)
    await until(lambda: engine.health().restarts == 1)
    await submitted(engine, 6)
    await asyncio.sleep(0.05)
    assert engine.health().paused and engine.health().generated_tokens == generated
    await soon(engine.resume())
    made = await soon(asyncio.gather(*tasks))
    assert [g.completion_ids for g in made] == old and {v for g in made for v in g.versions} == {1}
    assert await answers(late) == new
    assert engine.health().version == 2


async def test_a_weight_sync_survives_the_death_of_the_process(make: Make) -> None:
    engine = make()
    await answers(asked(engine, 1))
    tiny.randomise(engine.learner, seed=5)
    loading = asyncio.ensure_future(engine.sync(3))
    await asyncio.sleep(0)
    kill(engine)
    assert await soon(loading) == weight_digest(engine.learner.parameters())
    made = await soon(engine.generate([3], SamplingParams(max_tokens=2), 1))
    assert made.versions == (3, 3)


async def test_repeated_death_without_progress_ends_it_with_its_last_words(make: Make, tmp_path: Path) -> None:
    engine = make(launch=script(tmp_path, 'echo "out of memory, as always" >&2; kill -9 $$'))
    with pytest.raises(EngineError, match=r"died 3 times in a row.*killed by SIGKILL.*\nout of memory, as always"):
        await soon(asyncio.gather(*asked(engine, 3)))
    assert not engine.health().alive and "3 times" in (engine.health().error or "")
    with pytest.raises(EngineError, match="the engine has stopped"):
        await soon(engine.pause())


async def test_progress_forgives_deaths(make: Make) -> None:
    engine = make()
    for _ in range(2):
        for _ in range(2):
            killed = engine.pid
            kill(engine)
            (task,) = asked(engine, 1)
            await until(lambda killed=killed: engine.pid != killed)
            task.cancel()
        await answers(asked(engine, 1))
    assert engine.health().restarts == 4


async def test_a_request_that_was_cancelled_is_not_issued_again(make: Make) -> None:
    engine = make(max_batch=1)
    tasks = asked(engine, 3)
    await submitted(engine, 3)
    kill(engine)
    for task in tasks[:2]:
        task.cancel()
    await answers(tasks[2:])
    assert engine.health().generated_tokens < 2 * 200


async def test_what_is_cancelled_before_the_process_is_ready_is_never_begun(make: Make) -> None:
    engine = make()
    doomed, kept = asked(engine, 2)
    await asyncio.sleep(0)
    doomed.cancel()
    await soon(kept)
    assert engine.health().generated_tokens == 200


# ---- weight syncs ------------------------------------------------------------------------------------------


async def test_decoding_continues_through_weight_syncs(make: Make) -> None:
    engine = make()
    (task,) = asked(engine, 1, SamplingParams(max_tokens=240))
    await until(lambda: engine.health().generated_tokens > 5)
    version = 0
    while not task.done():
        version += 1
        tiny.randomise(engine.learner, seed=version)
        assert await engine.sync(version) == weight_digest(engine.learner.parameters())
    versions = (await task).versions
    assert list(versions) == sorted(versions) and len(set(versions)) >= 3
    assert engine.health().restarts == 0


async def test_weights_that_did_not_arrive_show_in_the_digest(make: Make) -> None:
    engine = make()
    write, slot = engine._weights.write, engine._weights.layout.slots[3]

    def spoil(buffer: int) -> None:
        write(buffer)
        engine._weights._maps[buffer][slot.start] ^= 1  # one bit

    engine._weights.write = spoil
    with pytest.raises(WeightSyncError, match=r"version 1 did not arrive: .* some are missing or changed"):
        await engine.sync(1)
    engine._weights.write = write
    assert await engine.sync(2) == weight_digest(engine.learner.parameters())


async def test_only_what_was_begun_and_sent_can_be_loaded(make: Make) -> None:
    engine = make()
    with pytest.raises(EngineError, match="sent before begin_update"):
        await soon(engine._weights.send(1))
    with pytest.raises(EngineError, match="end_update came before begin_update"):
        await soon(engine.end_update(1))
    await engine.sync(1)
    with pytest.raises(EngineError, match="end_update came before begin_update"):
        await soon(engine.end_update(2))  # a buffer is loaded once


async def test_a_restarted_process_must_find_the_weights_that_were_synced(make: Make) -> None:
    engine = make()
    await engine.sync(1)
    engine._weights._maps[engine._live.buffer][0] ^= 1
    kill(engine)
    with pytest.raises(EngineError, match="found other weights for version 1"):
        await soon(engine.generate([3], LONG, 1))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama_ungrouped_tied", {}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("llama_biases", {"dtype": "float64"}),
        ("llama", {"fast_path": False}),
        ("gpt2", {}),
        ("llama", {"lora": LoraSection(rank=4, targets=("q_proj", "up_proj"))}),
        ("llama", {"lora": LoraSection(rank=4, targets=("q_proj",)), "fast_path": False, "dtype": "bfloat16"}),
    ],
)
async def test_every_kind_of_model_is_served_as_the_learner_has_it(
    make: Make, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    section = ModelSection(name=str(tiny.saved_model(family, tmp_path)), **options)
    engine = make(section, row_block=8)
    model = build_causal_model(engine.learner, section.fast_path)
    model.row_block = 8
    shared = TorchEngine(model)
    params = SamplingParams(max_tokens=20)
    for version in range(1, 5):  # more often than there are buffers
        with torch.no_grad():
            for parameter in trained_parameters(engine.learner):
                parameter += 0.01 * version
        expected = weight_digest(trained_parameters(engine.learner))
        assert expected == await engine.sync(version) == await in_place(shared, engine.learner, version)
        theirs, ours = [await soon(asyncio.gather(*asked(one, 4, params))) for one in (engine, shared)]
        assert theirs == ours  # to the bit
    await shared.close()


async def in_place(engine: TorchEngine, learner: Any, version: int) -> str:
    sync = WeightSync(ModelWeights(learner), InPlace(engine._live.model), engine)
    return (await soon(sync.sync(version))).digest


@pytest.mark.parametrize("rank", [0, 4])
def test_the_process_reads_weights_where_the_learner_writes_them(llama: ModelSection, rank: int) -> None:
    section = llama.model_copy(update={"lora": LoraSection(rank=rank)})
    learner, engines = load_model(section), load_model(section)
    build_causal_model(learner)
    weights = SharedWeights(ModelWeights(learner))
    bound = BoundModels(engines, weights.layout, weights.files, build_causal_model)
    models: list[Any] = []
    for buffer in range(3):
        weights.write(buffer)
        models.append(bound.model(buffer))
        assert weight_digest(models[-1].weights()) == weight_digest(trained_parameters(learner))
        memory = {tensor.untyped_storage().data_ptr() for tensor in models[-1].weights()}
        assert len(memory) == 1  # all in the buffer, fused ones too: they were not copied out of it
    with torch.no_grad():
        for parameter in trained_parameters(learner):
            parameter += 1
    weights.write(1)
    same = [weight_digest(model.weights()) == weight_digest(trained_parameters(learner)) for model in models]
    assert same == [False, True, False]
    frozen = {model._embedding.weight.data_ptr() for model in models}
    assert len(frozen) == (1 if rank else 3)
    weights.close()


def test_a_buffer_that_is_released_gives_its_memory_back(llama: ModelSection) -> None:
    weights = SharedWeights(ModelWeights(load_model(llama)))
    assert [os.fstat(file).st_blocks for file in weights.files] == [0, 0, 0]
    weights.write(0)
    weights.write(2)
    weights.reserve((0,))
    assert weights.take_reserved() == 2  # which has memory already
    weights.release(2)
    taken = [os.fstat(file).st_blocks > 0 for file in weights.files]
    weights.reserve((0, None))
    assert taken == [True, False, False] and weights.take_reserved() == 1
    weights.close()


# ---- start and end ------------------------------------------------------------------------------------------------


def environment(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/environ").read_text().split("\0"))


def script(folder: Path, text: str) -> Any:
    """A launch of something else in the place of the process."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)

    def launch(options: EngineOptions, files: Any) -> Child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(path))
            return launch_engine(options, files)

    return launch


async def test_a_process_that_exits_at_the_start_is_not_tried_again(make: Make, tmp_path: Path) -> None:
    engine = make(launch=script(tmp_path, 'echo "no module named torch"; exit 3'))
    with pytest.raises(EngineError, match=r"could not start \(exit code 3\):\nno module named torch"):
        await soon(engine.generate([3], LONG, 1))
    assert engine.health().restarts == 0


async def test_a_model_that_cannot_be_loaded_is_reported_at_once(make: Make, tmp_path: Path) -> None:
    folder = tiny.saved_model("llama", tmp_path / "gone")
    section = ModelSection(name=str(folder))
    learner = load_model(section)
    (folder / "config.json").unlink()
    engine = make(section, learner=learner)
    with pytest.raises(EngineError, match=r"could not start: .*gone"):
        await soon(engine.generate([3], LONG, 1))


async def test_another_model_than_the_learners_is_refused(make: Make, llama: ModelSection, tmp_path: Path) -> None:
    folder = tiny.saved_model("llama", tmp_path / "other", intermediate_size=64)
    engine = make(ModelSection(name=str(folder)), learner=load_model(llama))
    with pytest.raises(EngineError, match=r"not the learner's: 6 trained tensors differ, such as model.layers.0.mlp"):
        await soon(engine.generate([3], LONG, 1))


async def test_closing_an_engine_that_was_never_used_ends_its_process(make: Make) -> None:
    engine = make()
    assert is_running(engine.pid)
    await engine.close()
    assert not is_running(engine.pid)


async def test_a_real_process_ignores_ctrl_c_and_sigterm_and_ends_with_the_learner(make: Make) -> None:
    engine = make(launch=launch_engine)
    os.kill(engine.pid, signal.SIGTERM)  # the interpreter has not even started
    tasks = asked(engine, 2)
    await until(lambda: engine.health().generated_tokens > 0)
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0)  # the terminal's signals are not for it
    os.kill(engine.pid, signal.SIGINT)
    os.kill(engine.pid, signal.SIGTERM)
    await answers(tasks)
    assert engine.health().restarts == 0
    assert "OMP_NUM_THREADS=1" in environment(engine.pid)
    await engine.close()
    assert not is_running(engine.pid)


def test_a_process_whose_learner_is_gone_before_it_has_started_ends_too(llama: ModelSection) -> None:
    weights = SharedWeights(ModelWeights(load_model(llama)))
    child = launch_engine(EngineOptions(llama), weights.files)
    assert child.end(60) == 0  # it was not killed: its socket was closed
    weights.close()


LEARNER = """
import asyncio, sys
from headrace.config import ModelSection
from headrace.engines.base import SamplingParams
from headrace.engines.process.engine import ProcessEngine
from headrace.engines.process.wire import EngineOptions
from headrace.models.load import load_model
from headrace.weights.shared_memory import SharedWeights
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync

async def main():
    section = ModelSection(name=sys.argv[1])
    source = ModelWeights(load_model(section))
    weights = SharedWeights(source)
    engine = ProcessEngine(weights, EngineOptions(section))
    while True:
        await engine.generate([3], SamplingParams(max_tokens=200), 1)
        await WeightSync(source, weights, engine).sync(1)
        print(engine.pid, flush=True)

asyncio.run(main())
"""


def test_nothing_is_left_when_the_learner_is_killed(llama: ModelSection) -> None:
    before = set(os.listdir("/dev/shm"))
    learner = subprocess.Popen([sys.executable, "-c", LEARNER, llama.name], stdout=subprocess.PIPE, text=True)
    assert learner.stdout is not None
    engine = int(learner.stdout.readline())
    assert is_running(engine)
    learner.kill()
    learner.wait()
    give_up = time.monotonic() + 10
    while is_running(engine) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not is_running(engine)
    ours = ("headrace", str(learner.pid), str(engine))
    assert not [name for name in set(os.listdir("/dev/shm")) - before if any(word in name for word in ours)]
