"""A deterministic run gives the same bits, whatever number of threads environment, machine or placement suggest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.local.backend import LocalBackend
from headrace.cli.main import run
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.engines import placement as placement_module
from headrace.engines.placement import DETERMINISTIC_THREADS, engine_threads, learner_threads
from headrace.errors import ConfigError
from headrace.ledger import Ledger
from headrace.models.kernels import cpu as native
from headrace.run.directory import claim_run_dir
from headrace.trainer.replay import Replay
from headrace.trainer.trainer import UnifiedTrainer

pytestmark = pytest.mark.usefixtures("threads_as_before")

BASE: dict[str, Any] = {
    "run": {"deterministic": True},
    "data": {"tasks": "countdown", "args": {"count": 64}},
    "workflow": {"name": "single_turn", "judger": "test_determinism:count_letters"},
    "rollout": {"group_size": 4, "max_tokens": 12},
    "optimizer": {"lr": 1e-3},
    "trainer": {"steps": 2, "batch_size": 4, "save_last": False},
    "track": {"trackers": ["jsonl"], "plot": False},
}


def count_letters(task: Any, reply: str) -> float:
    """A judger whose rewards differ."""
    return float(len(reply) % 3)


def config_in(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    given = {"run": {"dir": str(folder)}, **sections}
    return build_config({name: {**BASE.get(name, {}), **given.get(name, {})} for name in {*BASE, *given}})


def digests(run_dir: Path) -> list[str]:
    """Of the weights of every version."""
    with Ledger.read(run_dir) as ledger:
        found = [ledger.weight_sync(version) for version in range(100)]
    return [publication.digest for publication in found if publication]


@pytest.mark.parametrize("placement", ["colocate", "separate"])
def test_threads_are_the_same_on_every_machine_and_in_every_placement(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {"placement": placement}
    for cores in (1, 2, 16):
        monkeypatch.setattr(placement_module, "_cores", lambda cores=cores: cores)
        config = build_config({"run": {"deterministic": True}, "trainer": trainer})
        assert learner_threads(config) == engine_threads(config) == DETERMINISTIC_THREADS
        config = build_config({"run": {"deterministic": True}, "backend": {"threads": 5}, "trainer": trainer})
        assert learner_threads(config) == engine_threads(config) == 5


def test_colocated_and_separate_runs_end_with_the_same_weights_whatever_threads_there_are(tmp_path: Path) -> None:
    torch.set_num_threads(3)
    one = UnifiedTrainer(config_in(tmp_path / "one")).fit().run_dir
    torch.set_num_threads(1)
    two = (
        UnifiedTrainer(config_in(tmp_path / "two", trainer={**BASE["trainer"], "placement": "separate"})).fit().run_dir
    )
    assert len(digests(one)) == 2 and digests(one) == digests(two)
    pool = config_in(tmp_path / "pool", trainer={**BASE["trainer"], "placement": "separate"}, engine={"replicas": 2})
    assert digests(UnifiedTrainer(pool).fit().run_dir) == digests(one)


def test_a_thread_for_tensors_has_the_number_of_threads_that_was_set() -> None:
    script = (
        "import os, torch; from headrace.models.tensor_threads import run_apart; torch.set_num_threads(1);"
        "x = torch.randn(800, 800); count = lambda: len(os.listdir('/proc/self/task'));"
        "run_apart(lambda: (before := count(), x @ x, print(count() - before)))"
    )
    if not Path("/proc/self/task").exists():
        pytest.skip("threads cannot be counted here")
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


@pytest.mark.parametrize(("name", "value"), [("OMP_DYNAMIC", "TRUE"), ("OMP_THREAD_LIMIT", "1")])
def test_where_openmp_may_give_fewer_threads_it_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"exactly 2 threads, and {name}={value} may give it fewer; unset it"):
        LocalBackend.check(build_config({"run": {"deterministic": True}}))
    LocalBackend.check(build_config({}))


# ---- what else results depend on ----------------------------------------------------------------------------------


def test_a_deterministic_run_is_not_resumed_where_results_are_rounded_otherwise(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    begun = {"native kernels": "abc by cc 1", "threads": "2"}
    with claim_run_dir(config, begun) as claim:
        (claim.folder / "checkpoints" / "step_000001").mkdir(parents=True)
        (claim.folder / "checkpoints" / "step_000001" / "manifest.json").write_text("{}")
    before = {path: path.read_bytes() for path in claim.folder.rglob("*") if path.is_file()}
    with (
        pytest.raises(ConfigError, match=r'native kernels: "abc by cc 1" → "none".*HEADRACE_NATIVE.*run.resume = '),
        claim_run_dir(config, begun | {"native kernels": "none"}),
    ):
        pass
    assert before == {path: path.read_bytes() for path in claim.folder.rglob("*") if path.is_file()}
    with claim_run_dir(config, begun) as again:
        assert again.resumes


def test_numerics_name_the_kernels_and_what_chooses_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    config = build_config({"run": {"deterministic": True}})
    found = LocalBackend.numerics(config)
    assert found["threads"] == "2" and "MKL_CBWR=AVX2" in found["instructions chosen by"]
    assert found == LocalBackend.numerics(config)
    if native.kernels() is not None:
        native.kernels.cache_clear()
        monkeypatch.setenv("HEADRACE_NATIVE", "0")
        assert LocalBackend.numerics(config) == found | {"native kernels": "none"} != found
        native.kernels.cache_clear()


def test_a_run_records_its_numerics_only_if_it_is_deterministic(tmp_path: Path) -> None:
    for deterministic in (True, False):
        section = {"dir": str(tmp_path), "name": str(deterministic), "deterministic": deterministic}
        run_dir = (
            UnifiedTrainer(config_in(tmp_path, run=section, trainer={"steps": 1, "save_last": False})).fit().run_dir
        )
        assert (run_dir / "numerics.json").exists() == deterministic


def test_replay_says_that_results_are_rounded_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = {**BASE["trainer"], "placement": "separate", "max_staleness": 1}
    config = config_in(tmp_path, trainer=trainer, engine={"threads": 1})  # a setting that replaying has no use for
    run_dir = UnifiedTrainer(config).fit().run_dir
    torch.set_num_threads(1)
    assert run(["replay", str(run_dir)]) == 0 and "otherwise" not in capsys.readouterr().out
    recorded = json.loads((run_dir / "numerics.json").read_text())
    (run_dir / "numerics.json").write_text(json.dumps(recorded | {"torch": "1.0"}))
    assert Replay(run_dir).rounded_otherwise == [f'torch: "1.0" → "{torch.__version__}"']
    run(["replay", str(run_dir)])
    assert "rounding differs from where the run was made" in " ".join(capsys.readouterr().out.split())


# ---- in the environments that users have ---------------------------------------------------------------------------

THREADS = (None, "1", "2", "4")


def trained_apart(config: RunConfig, threads: str | None, stop_after: int | None = None, **changed: str) -> None:
    """A run, or the rest of it, in a process with so many threads in its environment; perhaps killed after a step."""
    script = (
        "import os, signal, sys; from headrace import Callback, RunConfig, UnifiedTrainer\n"
        "class Kill(Callback):\n"
        "    def on_batch_end(self, step, metrics):\n"
        "        if step == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "UnifiedTrainer(RunConfig.model_validate_json(sys.argv[1]), callbacks=[Kill()]).fit()"
    )
    command = [sys.executable, "-c", script, config.model_dump_json(), str(stop_after or -1)]
    done = subprocess.run(command, env=environment_with(threads) | changed, capture_output=True, text=True, check=False)
    assert done.returncode == (-9 if stop_after else 0), done.stderr[-3000:]


def environment_with(threads: str | None) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    folders = os.pathsep.join(map(str, Path(__file__).parents[:2]))
    return plain | {"PYTHONPATH": folders} | ({"OMP_NUM_THREADS": threads} if threads else {})


@pytest.mark.slow
def test_a_run_under_one_number_of_threads_and_resumed_under_another_ends_with_the_same_weights(tmp_path: Path) -> None:
    found = []
    for threads in THREADS:
        for placement in ("colocate", "separate"):
            trainer = {"steps": 4, "batch_size": 4, "save_every": 1, "placement": placement}
            config = config_in(tmp_path / f"{threads}-{placement}", trainer=trainer)
            if placement == "separate":
                trained_apart(config, "1", stop_after=2)
            trained_apart(config, threads)
            found.append(digests(config.run.dir / config.run.name))
    assert len(found[0]) == 4 and all(one == found[0] for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("begun", THREADS)
def test_a_separate_asynchronous_run_is_replayed_the_same_under_any_number_of_threads(
    begun: str | None, tmp_path: Path
) -> None:
    config = config_in(tmp_path, trainer={"steps": 5, "batch_size": 4, "placement": "separate", "max_staleness": 2})
    trained_apart(config, begun)
    for threads in THREADS:
        command = [sys.executable, "-m", "headrace", "replay", str(tmp_path / "run")]
        done = subprocess.run(command, env=environment_with(threads), capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.count("the same") == 5, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_with_native_kernels_is_not_resumed_without_a_compiler(tmp_path: Path) -> None:
    if native.kernels() is None:
        pytest.skip("no native kernels here")
    config = config_in(tmp_path, trainer={"steps": 3, "batch_size": 4})
    trained_apart(config, None, stop_after=1)
    (tmp_path / "bin").mkdir()
    with pytest.raises(AssertionError, match=r'native kernels: ".* by .*" → "none"'):
        trained_apart(config, None, PATH=str(tmp_path / "bin"))
    trained_apart(config, None)
