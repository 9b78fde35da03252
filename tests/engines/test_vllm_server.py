"""What only a real vLLM server shows: weights after many syncs, kills, planted faults, adapters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_servers import CPU, new_server

import tiny
from headrace.backends.local.frozen import score_rows
from headrace.config import LoraSection, ModelSection
from headrace.engines.base import Generation, SamplingParams
from headrace.engines.servers.client import ServerClient
from headrace.engines.servers.life import ServerOptions
from headrace.engines.servers.server import StartedServer
from headrace.engines.vllm.engine import VllmEngine
from headrace.errors import WeightSyncError
from headrace.models.causal import build_causal_model
from headrace.models.load import load_model
from headrace.weights.canary import Canary, canary_rows
from headrace.weights.sender import server_sender
from headrace.weights.source import ModelWeights
from headrace.weights.sync import WeightSync
from headrace.weights.vllm_plugin import FOLDER

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 12, 40]
LONG = 600  # tokens that are not sampled before a test has done something to the server
OFF = 3e-4  # two implementations in float32, after many tokens of a random model; mostly 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # many layers: tokens must come slowly enough
    shape = {"hidden_size": 128, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    return tiny.saved_model("llama_ungrouped_tied", tmp_path_factory.mktemp("model"), **shape)


class Pair:
    """A learner, a real server, and the sync between them."""

    def __init__(
        self, folder: Path, log: Path, transport: str, lora: int = 0, sleeps: bool = False, hang_s: float = 60.0,
        **server: Any,
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        section = ModelSection(name=str(folder), lora=LoraSection(rank=lora, targets=("q_proj", "v_proj")))
        self.hf_model = load_model(section)
        self.model = build_causal_model(self.hf_model)
        self.server: StartedServer = new_server(folder, log, transport, lora_rank=lora, **server)
        length = self.hf_model.config.max_position_embeddings
        options = ServerOptions(
            vocabulary=tiny.VOCABULARY, max_model_length=length - 1, detokenize=tiny.detokenize,
            transport=transport, health_every_s=0.02, sleeps=sleeps, hang_s=hang_s,
        )  # fmt: skip
        self.engine = VllmEngine(self.server, lambda: ServerClient(self.server.url, timeout_s=hang_s), options)
        source = ModelWeights(self.hf_model)
        self.sender = server_sender(transport, source)
        self.sender.bind(self.engine.endpoints)
        canary = Canary(canary_rows(tiny.VOCABULARY), self.score, 1e-3)
        self.sync = WeightSync(source, self.sender, self.engine, canary, pauses=True)

    async def score(self, rows: Any) -> list[list[float]]:
        return score_rows(self.model, rows, [1.0] * len(rows), [range(len(rows))], 256)

    @torch.no_grad()
    def move(self, seed: int, scale: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.hf_model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator) * (parameter.std() + 0.05)

    async def far_off(self, made: Generation, first: int = 0) -> float:
        """The largest difference between sampler and learner, from a token on."""
        (scores,) = await self.score([[*made.prompt_ids, *made.completion_ids]])
        ours = scores[len(made.prompt_ids) - 1 :]
        return float(np.abs(np.array(ours) - np.array(made.logprobs))[first:].max())

    def asked(self, tokens: int, seed: int = 1) -> asyncio.Future[Generation]:
        return asyncio.ensure_future(self.engine.generate(PROMPT, SamplingParams(max_tokens=tokens), seed))


@asynccontextmanager
async def running(pair: Pair) -> AsyncIterator[Pair]:
    try:
        yield pair
    finally:
        await pair.engine.close()
        pair.sender.close()


async def until_tokens(pair: Pair, more: int) -> None:
    goal = pair.engine.health().generated_tokens + more
    while pair.engine.health().generated_tokens < goal:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("transport", ["file", "gloo"])
async def test_sampler_and_learner_agree_after_twenty_syncs(folder: Path, tmp_path: Path, transport: str) -> None:
    async with running(Pair(folder, tmp_path / "log", transport)) as pair:
        worst = 0.0
        for version in range(1, 21):
            pair.move(version)
            await pair.sync.sync(version)
            made = await pair.asked(20, seed=version)
            assert set(made.versions) == {version}
            worst = max(worst, await pair.far_off(made))
        print(f"largest difference over 20 syncs by {transport}: {worst:.1e}")
        assert worst <= 1e-4


async def test_spans_of_versions_are_exact_with_requests_in_flight(folder: Path, tmp_path: Path) -> None:
    async with running(Pair(folder, tmp_path / "log", "file")) as pair:
        await pair.sync.sync(1)
        tasks = list[asyncio.Future[Generation]]()
        for _ in range(5):  # on a machine without a free moment, all may have ended before it is noticed
            tasks = [pair.asked(LONG, seed) for seed in range(8)]
            await until_tokens(pair, 160)
            if not any(task.done() for task in tasks):
                break
            await asyncio.gather(*tasks)
        old = [p.detach().clone() for p in pair.hf_model.parameters()]
        pair.move(7)
        await pair.sync.sync(2)
        made = await asyncio.gather(*tasks)
        for one in made:
            before = one.versions.count(1)
            assert one.versions == (1,) * before + (2,) * (LONG - before) and 0 < before < LONG
        with torch.no_grad():
            for parameter, value in zip(pair.hf_model.parameters(), old, strict=True):
                parameter.copy_(value)
        for one in made:  # under the old weights the first part is exact, and the token after it is not
            before = one.versions.count(1)
            (scores,) = await pair.score([[*one.prompt_ids, *one.completion_ids]])
            apart = np.abs(np.array(scores[len(PROMPT) - 1 :]) - np.array(one.logprobs))
            assert apart[:before].max() < OFF < apart[before : before + 5].max()


@pytest.mark.parametrize("victim", ["the server", "the engine core"])
async def test_a_killed_server_comes_back_with_the_current_weights(folder: Path, tmp_path: Path, victim: str) -> None:
    async with running(Pair(folder, tmp_path / "log", "file")) as pair:
        pair.move(3)
        await pair.sync.sync(4)
        alone = [await pair.asked(LONG, seed) for seed in range(4)]
        tasks = [pair.asked(LONG, seed) for seed in range(4)]
        await until_tokens(pair, 40)
        assert pair.server.child is not None
        first, *others = pair.server.child.descendants()
        os.kill(first if victim == "the server" else others[-1], signal.SIGKILL)
        for made, expected in zip(await asyncio.wait_for(asyncio.gather(*tasks), 120), alone, strict=True):
            assert made.completion_ids == expected.completion_ids and set(made.versions) == {4}
            assert await pair.far_off(made) <= OFF
        assert pair.engine.health().restarts == 1


async def test_a_server_killed_during_a_sync_gets_the_weights_afterwards(folder: Path, tmp_path: Path) -> None:
    async with running(Pair(folder, tmp_path / "log", "file")) as pair:
        await pair.sync.sync(1)
        real: Callable[..., Any] = pair.sender.transfer.send
        killed: list[int] = []

        def kill_first(*given: Any) -> Any:
            if not killed:
                assert pair.server.child is not None
                killed.append(pair.server.child.descendants()[0])
                os.kill(killed[0], signal.SIGKILL)
            return real(*given)

        pair.sender.transfer.send = kill_first  # type: ignore[method-assign]
        pair.move(5)
        await asyncio.wait_for(pair.sync.sync(2), 120)
        made = await pair.asked(30)
        assert killed and set(made.versions) == {2} and await pair.far_off(made) <= 1e-4


FORGETS = "Receiver._repack_heads = lambda self: None"
DROPS = """
usual, updates = FileReceiver._tensors, []
def tensors(content, info):
    updates.append(1)
    for name, tensor in usual(content, info):
        lost = len(updates) > 1 and name == "model.layers.1.mlp.up_proj.weight"
        yield name, torch.zeros_like(tensor) if lost else tensor
FileReceiver._tensors = staticmethod(tensors)
"""
DOES_NOTHING = """
start, load, finish, updates = Receiver.start_weight_update, Receiver.load, Receiver.finish_weight_update, []
def begin(self):
    updates.append(1)
    self.received = []
    if len(updates) == 1: start(self)
def take(self, arriving):
    if len(updates) == 1: return load(self, arriving)
    self.received += [checksum(tensor) for _, tensor in arriving]
def end(self):
    if len(updates) == 1: finish(self)
Receiver.start_weight_update, Receiver.load, Receiver.finish_weight_update = begin, take, end
"""


def plugin(folder: Path, code: str) -> dict[str, str]:
    """Environment of a server whose receiving end is changed by a plugin of the test's."""
    about = folder / "faulty-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nfaulty = faulty:register\n")
    imports = (
        "import torch",
        "from headrace_vllm.checksum import checksum",
        "from headrace_vllm.receivers import FileReceiver, Receiver",
    )
    body = "\n".join(f"    {line}" for line in (*imports, *code.strip().splitlines()))
    (folder / "faulty.py").write_text(f"def register():\n{body}\n")
    return {**CPU, "PYTHONPATH": os.pathsep.join((str(folder), str(FOLDER)))}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        pytest.param(FORGETS, "all tensors arrived, so it decodes with a stale copy", id="stale_head"),
        pytest.param(DROPS, r"1 of \d+ tensors did not arrive .*: model.layers.1.mlp.up_proj.weight;", id="drops"),
        pytest.param(
            DOES_NOTHING, "still decodes with the weights of version 1: the sync changed nothing", id="nothing"
        ),
    ],
)
async def test_a_planted_fault_is_a_sync_error_that_says_which(
    folder: Path, tmp_path: Path, code: str, says: str
) -> None:
    pair = Pair(folder, tmp_path / "log", "file", variables=plugin(tmp_path / "plugin", code))
    async with running(pair):
        pair.move(2, scale=0.5 if code != FORGETS else 0.0)
        await pair.sync.sync(1)
        pair.move(3, scale=0.5)
        with pytest.raises(WeightSyncError, match=says):
            await pair.sync.sync(2)


async def test_weights_of_experts_that_the_cpu_build_does_not_take_over_are_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    experts = tiny.saved_model("qwen3_moe", tmp_path / "model", **shape)
    async with running(Pair(experts, tmp_path / "log", "file")) as pair:
        pair.move(1)
        with pytest.raises(WeightSyncError, match="all tensors arrived"):
            await pair.sync.sync(1)


async def test_by_disk_a_server_that_reloads_has_the_new_weights(tmp_path: Path) -> None:
    untied = tiny.saved_model("llama", tmp_path / "model", hidden_size=128)
    async with running(Pair(untied, tmp_path / "log", "disk")) as pair:
        for version in (1, 2, 3):
            pair.move(version)
            await pair.sync.sync(version)
            made = await pair.asked(20, seed=version)
            assert set(made.versions) == {version} and await pair.far_off(made) <= 1e-4


async def test_by_disk_a_tied_head_stays_stale_on_the_cpu_and_the_canary_sees_it(folder: Path, tmp_path: Path) -> None:
    async with running(Pair(folder, tmp_path / "log", "disk")) as pair:
        await pair.sync.sync(1)
        pair.move(3, scale=0.5)
        with pytest.raises(WeightSyncError, match="some tensors are missing, changed, or kept in a stale copy"):
            await pair.sync.sync(2)


async def test_a_server_whose_engine_core_hangs_is_replaced(folder: Path, tmp_path: Path) -> None:
    async with running(Pair(folder, tmp_path / "log", "file", hang_s=30.0)) as pair:
        pair.move(3)
        await pair.sync.sync(4)
        alone = await pair.asked(LONG, 1)
        assert pair.server.child is not None
        os.kill(pair.server.child.descendants()[-1], signal.SIGSTOP)  # the server still says that it is well
        made = await asyncio.wait_for(pair.asked(LONG, 1), 400)
        assert made.completion_ids == alone.completion_ids and set(made.versions) == {4}
        assert pair.engine.health().restarts == 1 and await pair.far_off(made) <= OFF


async def test_a_colocated_server_sleeps_while_the_learner_works(folder: Path, tmp_path: Path) -> None:
    """The order of calls is the one of a GPU; the CPU build has no memory to give back."""
    async with running(Pair(folder, tmp_path / "log", "file", sleeps=True)) as pair:
        await pair.sync.sync(1)
        calls: list[str] = []
        usual = pair.engine._client.post

        async def post(path: str, *given: Any) -> Any:
            calls.append(path)
            return await usual(path, *given)

        pair.engine._client.post = post  # type: ignore[method-assign]
        await pair.engine.pause()
        await pair.engine.release_cache()
        pair.move(2)
        await pair.sync.sync(2)
        await pair.engine.resume()
        generate = "/inference/v1/generate"
        order = [path.partition("?")[0] for path in calls]
        assert order[:5] == ["/pause", "/sleep", "/wake_up", "/pause", "/start_weight_update"]
        assert order[5:7] == ["/finish_weight_update", "/update_weight_version"]  # the tensors travel in between
        assert order[7:] == ["/resume", generate, generate, "/pause", "/resume"]  # canary rows, then sampling
        made = await pair.asked(20)
        assert set(made.versions) == {2} and await pair.far_off(made) <= 1e-4


async def test_only_adapters_travel_and_old_ones_are_unloaded(folder: Path, tmp_path: Path) -> None:
    async with running(Pair(folder, tmp_path / "log", "adapter", lora=4)) as pair:
        pair.move(1)
        await pair.sync.sync(1)
        long = pair.asked(LONG)
        await until_tokens(pair, 20)
        pair.move(2)
        await pair.sync.sync(2)
        made = await pair.asked(20)
        assert set(made.versions) == {2} and await pair.far_off(made) <= 1e-3
        assert set((await long).versions) == {1}  # it ends with the adapter it began with
        await asyncio.sleep(0.5)
        names = [one["id"] for one in (await ServerClient(pair.server.url).get("/v1/models"))["data"]]
        assert names == ["policy", "policy-v2"]
