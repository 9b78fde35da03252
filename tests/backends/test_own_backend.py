"""The backend that docs/backend_protocol.md shows in full: it is the file, passes the contract, and trains."""

from __future__ import annotations

import json
import re
from inspect import isfunction
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from contracts.backend_contract import IMITATE, BackendContract, random_samples
from fakes import ROOT
from headrace import UnifiedTrainer, load_config, registry
from headrace.algorithms.batching import grad_scale, pack
from headrace.backends.base import Backend
from headrace.backends.local.backend import LocalBackend
from headrace.config import AlgorithmSection, RunConfig
from headrace.config.loading import build_config
from headrace.errors import BackendError, ConfigError
from headrace.evaluation.evaluate import export_run
from headrace.registry import load_object
from headrace.run.checkpoint import list_checkpoints
from headrace.weights.base import SyncedWeights
from headrace.weights.sync import WeightSync

FILE = ROOT / "examples" / "own_backend.py"
OwnBackend = load_object(f"{FILE}:OwnBackend")
CALLS = [name for name, found in vars(Backend).items() if isfunction(found) and not name.startswith("_")]


def make_own(**changes: Any) -> Backend:
    torch.set_num_threads(1)
    return OwnBackend(build_config(dict(changes)))


class TestOwnBackend(BackendContract):
    def make_backend(self, config: RunConfig) -> Backend:
        torch.set_num_threads(1)
        return OwnBackend(config)


class TestOwnBackendWithLora(TestOwnBackend):
    settings: ClassVar[dict[str, Any]] = {"model": {"lora": {"rank": 4}}}


def test_the_page_shows_the_file_and_it_is_short() -> None:
    source = FILE.read_text(encoding="utf-8")
    assert f"```python\n{source}```\n" in (ROOT / "docs" / "backend_protocol.md").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 135


def test_the_page_names_every_method_of_the_protocol() -> None:
    page = (ROOT / "docs" / "backend_protocol.md").read_text(encoding="utf-8")
    assert len(CALLS) == 11 and [name for name in ("check", *CALLS) if f"### `{name}(" not in page] == []


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cross_entropy"])
async def test_it_makes_the_same_step_as_the_local_backend(loss: str) -> None:
    settings: dict[str, Any] = {"model": {"dtype": "float64", "fast_path": False}, "optimizer": {"eps": 1.0}}
    algorithm = AlgorithmSection(loss=loss, entropy_coef=0.1)
    batch, found = pack(random_samples(6, 90), algorithm, 60), []
    for backend in (make_own(**settings), LocalBackend(build_config(settings))):
        trained = await backend.forward_backward(batch, algorithm)
        stepped = await backend.optim_step(1e-2, grad_scale([batch], algorithm))
        after = await backend.compute_logprobs(pack(batch.samples, IMITATE, 512))
        figures = {**trained.metrics.reduce(), **stepped.reduce()}
        found.append((list(figures), [*figures.values(), *(value for row in after for value in row)]))
        await backend.close()
    (names, values), (local_names, local_values) = found
    assert names == local_names and values == pytest.approx(local_values, rel=1e-9)


def run(tmp_path: Path, *settings: str) -> tuple[list[dict[str, Any]], Path]:
    """The metrics of each step of a small run of the example, and its folder."""
    given = [
        f"--run.dir={tmp_path}",
        f"--backend.name={FILE}:OwnBackend",
        "--trainer.batch_size=4",
        "--track.plot=false",
    ]
    config = load_config(FILE.with_suffix(".toml"), [*given, "--rollout.max_tokens=40", *settings])
    result = UnifiedTrainer(config).fit()
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"]], result.run_dir


SCHEDULES = {
    "synchronous": [],
    "colocated": ["--trainer.max_staleness=1"],
    "drained": ["--trainer.max_staleness=1", "--trainer.partial_rollouts=false"],
    "streamed": ["--trainer.max_staleness=1", "--trainer.stream=true"],
    "separate": ["--trainer.max_staleness=1", "--trainer.placement=separate"],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_trains_in_every_schedule(schedule: str, tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "--trainer.steps=3", *SCHEDULES[schedule])
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert any(row["policy/grad_norm"] > 0 for row in rows)
    assert all(row["drift/same_version"] < 1e-4 for row in rows if "drift/same_version" in row)


class RecordingBackend(OwnBackend):
    """Remembers every call, every weight sync, and whether the engine was paused then."""

    calls: ClassVar[list[tuple[str, bool]]] = []
    engine: ClassVar[Any] = None

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS:
            RecordingBackend.record(name)
        return super().__getattribute__(name)

    @staticmethod
    def record(name: str) -> None:
        engine = RecordingBackend.engine
        RecordingBackend.calls.append((name, engine is not None and engine.health().paused))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_methods_are_called_as_the_page_says(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {("backend", "recording"): RecordingBackend})
    monkeypatch.setattr(RecordingBackend, "calls", [])
    sync = WeightSync.sync

    async def recorded(self: WeightSync, version: int) -> SyncedWeights:
        RecordingBackend.engine = self._engine
        RecordingBackend.record("sync")
        return await sync(self, version)

    monkeypatch.setattr(WeightSync, "sync", recorded)
    monkeypatch.setattr(RecordingBackend, "engine", None)
    changes = ["--backend.name=recording", "--algorithm.kl.coef=0.01", "--trainer.steps=2", "--trainer.save_every=1"]
    run(tmp_path, *changes, *SCHEDULES[schedule])
    step = "(((compute_logprobs )+forward_backward )+optim_step sync save )"
    assert re.fullmatch(f"host sync {step}{{2}}close ", "".join(f"{name} " for name, _ in RecordingBackend.calls))
    paused = {name: {was for call, was in RecordingBackend.calls[2:] if call == name} for name in (*CALLS, "sync")}
    shares, in_step = schedule != "separate", schedule == "synchronous"
    assert paused["optim_step"] == paused["sync"] == {shares}
    assert paused["forward_backward"] == {in_step}


def test_a_run_resumes_and_is_exported(tmp_path: Path) -> None:
    run(tmp_path, "--trainer.steps=1")
    rows, run_dir = run(tmp_path, "--trainer.steps=2")
    assert [row["step"] for row in rows] == [1, 2]
    folder = export_run(run_dir, tmp_path / "model")
    saved = load_file(list_checkpoints(run_dir)[-1] / "weights.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert saved.keys() >= exported.keys() and all(torch.equal(saved[name], exported[name]) for name in exported)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"run": {"deterministic": True}}, "run.deterministic = true does nothing"),
        ({"algorithm": {"estimator": "gae", "value_head": True}}, "algorithm.value_head = true does nothing"),
        ({"backend": {"threads": 2}}, "leave it at 0"),
    ],
)
def test_what_it_cannot_do_is_refused_before_a_model_is_loaded(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OwnBackend.check(build_config(setting))


async def test_it_has_no_value_head() -> None:
    backend = make_own()
    with pytest.raises(BackendError, match="no value head"):
        await backend.compute_values(pack(random_samples(1, 90), IMITATE, 512))
    await backend.close()
