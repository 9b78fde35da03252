"""The run directory: which one, whose, and what may be done in it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoint_data import save_one
from headrace.config import RunConfig
from headrace.config import compatibility as resume
from headrace.config.loading import build_config
from headrace.errors import ConfigError
from headrace.run.directory import Claim, claim_run_dir, mark_finished


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    run = {"dir": str(tmp_path), "name": "try"} | sections.pop("run", {})
    return build_config({"run": run, **sections})


def claim(tmp_path: Path, **sections: Any) -> Claim:
    """Claimed, and given back."""
    with claim_run_dir(config(tmp_path, **sections)) as found:
        return found


async def begin(tmp_path: Path, **sections: Any) -> Path:
    """A run that has made a checkpoint."""
    folder = claim(tmp_path, **sections).folder
    await save_one(folder, 5)
    return folder


def stored(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# ---- which folder ----------------------------------------------------------------------------------------------------


async def test_an_unfinished_run_is_resumed_and_a_finished_one_left_alone(tmp_path: Path) -> None:
    first = await begin(tmp_path)
    again = claim(tmp_path)
    assert (again.folder, again.resumes, again.notes) == (first, True, ()) and first == tmp_path / "try"
    mark_finished(first, {"eval/words/pass@1": 0.5})
    second = claim(tmp_path)
    mark_finished(second.folder, {})
    assert [second.folder.name, claim(tmp_path).folder.name] == ["try-2", "try-3"]
    assert second.notes == ("try is finished; this run is try-2",) and not second.resumes


async def test_never_leaves_an_unfinished_run_alone(tmp_path: Path) -> None:
    first = await begin(tmp_path)
    before = (first / "config.json").read_bytes()
    second = claim(tmp_path, run={"resume": "never"}, optimizer={"lr": 1.0})
    assert second.folder.name == "try-2" and second.notes == ("try is left alone; this run is try-2",)
    assert (first / "config.json").read_bytes() == before
    assert claim(tmp_path, run={"resume": "never"}).folder.name == "try-3"


async def test_a_path_starts_from_there_in_a_folder_of_its_own(tmp_path: Path) -> None:
    first = await begin(tmp_path)
    for source in (first, first / "checkpoints" / "step_000005"):
        run = {"resume": str(source), "name": f"from-{source.name}"}
        found = claim(tmp_path, run=run, optimizer={"lr": 1e-4})
        assert found.folder.name == run["name"] and found.start_from == source and not found.resumes
        assert "optimizer.lr: 1e-05 → 0.0001" in found.notes[0]
        await save_one(found.folder, 7)
        again = claim(tmp_path, run=run, optimizer={"lr": 1e-4})  # the same command again goes on with what it began
        assert again.folder == found.folder and again.resumes
    other = claim(tmp_path, run={"resume": str(first / "checkpoints" / "step_000005")})
    assert other.folder.name == "try-2"  # under the name of the run that it comes from, too


async def test_a_path_is_refused_where_its_state_cannot_be_used(tmp_path: Path) -> None:
    first = await begin(tmp_path)
    with pytest.raises(ConfigError, match=r"data.args.count: \(none\) → 8.*headrace export .* FOLDER"):
        claim(tmp_path, run={"resume": str(first), "name": "b"}, data={"args": {"count": 8}})
    with pytest.raises(ConfigError, match=r"model.lora.rank: 0 → 4"):
        claim(tmp_path, run={"resume": str(first), "name": "b"}, model={"lora": {"rank": 4}})


@pytest.mark.parametrize(
    ("word", "says"), [("nevr", 'did you mean "never"?'), ("", 'got ""'), ("no/such/run", 'got "no/such/run"')]
)
def test_a_resume_that_is_nothing_is_an_error(tmp_path: Path, word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r'run.resume must be "auto", "never" or a folder') as raised:
        claim(tmp_path, run={"resume": word})
    assert says in str(raised.value)
    assert not (tmp_path / "try").exists()


def test_a_folder_without_checkpoints_cannot_be_started_from(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run folder with one"):
        claim(tmp_path, run={"resume": str(tmp_path / "empty")})


async def test_its_own_path_extends_a_finished_run(tmp_path: Path) -> None:
    folder = await begin(tmp_path, trainer={"steps": 5})
    mark_finished(folder, {})
    own = {"resume": str(folder)}
    with pytest.raises(ConfigError, match=r"is finished after 5 steps; give a larger --trainer.steps"):
        claim(tmp_path, run=own, trainer={"steps": 5})
    assert (folder / "finished").exists()
    found = claim(tmp_path, run=own, trainer={"steps": 9})
    assert stored(folder)["run"]["resume"] == "auto"  # as it was begun
    assert found.folder == folder and found.resumes and found.start_from is None
    assert found.notes == ("changed settings: trainer.steps: 5 → 9",)
    assert not (folder / "finished").exists() and stored(folder)["trainer"]["steps"] == 9


def test_a_finished_run_without_a_checkpoint_cannot_be_extended(tmp_path: Path) -> None:
    folder = claim(tmp_path, trainer={"steps": 5}).folder
    mark_finished(folder, {})
    with pytest.raises(ConfigError, match="has no checkpoint to resume from"):
        claim(tmp_path, run={"resume": str(folder)}, trainer={"steps": 9})


# ---- settings --------------------------------------------------------------------------------------------------------


def test_the_written_configuration_gives_the_same_run_again(tmp_path: Path) -> None:
    folder = claim(tmp_path).folder
    assert build_config(stored(folder)) == config(tmp_path)


ALLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "more steps": ({"trainer": {"steps": 200}}, "trainer.steps: 100 → 200"),
    "checkpoints": ({"trainer": {"save_every": 7, "keep_last": 3}}, "keep_last: 2 → 3; trainer.save_every: 0 → 7"),
    "evaluation": ({"eval": {"sets": {"dev": {"tasks": "countdown"}}}}, "eval.sets.dev.workflow: (none) → null"),
    "trackers": ({"track": {"trackers": ["jsonl"]}}, 'track.trackers: ["console", "jsonl", "tensorboard"] → ["jsonl"]'),
    "engine": ({"engine": {"max_batch": 4}}, "engine.max_batch: 128 → 4"),
    "limits": ({"rollout": {"timeout_s": 5}}, "rollout.timeout_s: 600.0 → 5.0"),
    "micro-batches": ({"backend": {"micro_batch_tokens": 64}}, "backend.micro_batch_tokens: 3072 → 64"),
    "placement": ({"trainer": {"placement": "separate"}}, 'trainer.placement: "colocate" → "separate"'),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({"optimizer": {"lr": 1e-4}}, "optimizer.lr: 1e-05 → 0.0001"),
    "fewer steps": ({"trainer": {"steps": 50}}, "trainer.steps: 100 → 50 (it may only grow). Take"),
    "seed": ({"run": {"seed": 1}}, "run.seed: 0 → 1"),
    "data": ({"data": {"args": {"count": 9}}}, "data.args.count: (none) → 9"),
    "loss": ({"algorithm": {"loss": "gspo"}}, 'algorithm.loss: "ppo_clip" → "gspo"'),
    "sampling": ({"rollout": {"max_tokens": 9}}, "rollout.max_tokens: 256 → 9"),
    "longest": ({"engine": {"max_model_length": 99}}, "engine.max_model_length: null → 99"),
    "two": ({"optimizer": {"lr": 1e-4}, "trainer": {"batch_size": 2}}, "→ 0.0001; trainer.batch_size: 16 → 2"),
}


@pytest.mark.parametrize("what", ALLOWED)
async def test_an_allowed_change_is_reported_and_written_down(tmp_path: Path, what: str) -> None:
    sections, says = ALLOWED[what]
    await begin(tmp_path)
    found = claim(tmp_path, **sections)
    (note,) = found.notes
    assert note.startswith("changed settings: ") and note.endswith(says)
    assert build_config(stored(found.folder)) == config(tmp_path, **sections)


@pytest.mark.parametrize("what", REFUSED)
async def test_another_change_is_refused_with_the_difference_and_nothing_is_written(tmp_path: Path, what: str) -> None:
    sections, says = REFUSED[what]
    folder = await begin(tmp_path)
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ConfigError) as raised:
        claim(tmp_path, **sections)
    assert says in str(raised.value) and 'run.resume = "never"' in str(raised.value)
    assert (folder / "config.json").read_bytes() == before
    assert claim(tmp_path).resumes  # and the lock was given back


async def test_what_changes_rounding_is_refused_in_a_deterministic_run(tmp_path: Path) -> None:
    exact = {"deterministic": True}
    await begin(tmp_path, run=exact)
    for sections in (ALLOWED["micro-batches"][0], ALLOWED["placement"][0], {"engine": {"kept_tokens": 0}}):
        with pytest.raises(ConfigError, match="was begun with other settings"):
            claim(tmp_path, run=exact, **sections)
    assert claim(tmp_path, run=exact, engine={"max_batch": 4}).resumes


async def test_more_steps_of_a_falling_learning_rate_are_reported(tmp_path: Path) -> None:
    await begin(tmp_path, optimizer={"schedule": "cosine"})
    found = claim(tmp_path, optimizer={"schedule": "cosine"}, trainer={"steps": 200})
    assert found.notes[1] == "the learning rate follows the schedule of 200 steps from here on"


def test_a_start_that_made_nothing_does_not_hold_on_to_its_settings(tmp_path: Path) -> None:
    claim(tmp_path)
    found = claim(tmp_path, optimizer={"lr": 1.0})
    assert not found.resumes and stored(found.folder)["optimizer"]["lr"] == 1.0


def test_steps_without_a_checkpoint_hold_on_to_them(tmp_path: Path) -> None:
    folder = claim(tmp_path).folder
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    assert not claim(tmp_path).resumes
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert claim(tmp_path).resumes
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        claim(tmp_path, optimizer={"lr": 1.0})


async def test_a_setting_that_is_newer_than_the_run_was_at_its_default(tmp_path: Path) -> None:
    folder = await begin(tmp_path)
    values = stored(folder)
    del values["trainer"]["max_staleness"], values["alarm"]
    (folder / "config.json").write_text(json.dumps(values))
    assert claim(tmp_path).notes == ()
    (folder / "config.json").write_text(json.dumps(values | {"gone": {"knob": 3}}))
    with pytest.raises(ConfigError, match=r"gone.knob: 3 → \(none\)"):
        claim(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]"])
async def test_an_unreadable_configuration_is_an_error_with_the_remedy(tmp_path: Path, content: str) -> None:
    folder = await begin(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config.json.*run.resume = .never."):
        claim(tmp_path)


def test_the_documentation_lists_every_setting_that_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run_files.md").read_text()
    for key in (*resume.FREE, *resume.UNLESS_DETERMINISTIC, *resume.FIXED, *resume.BOUND_TO_STATE):
        assert f"`{key}`" in page or f"`[{key}]`" in page, key


# ---- one process -----------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from headrace.run.directory import claim_run_dir
from headrace.config.loading import build_config
with claim_run_dir(build_config({"run": {"dir": sys.argv[1], "name": "try"}})):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def held_elsewhere(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_folder_in_use_is_an_error_that_names_the_process_until_that_is_killed(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        before = (tmp_path / "try" / "config.json").read_bytes()
        with pytest.raises(ConfigError, match=rf"try is in use by process {process.pid} on .*--run-dir"):
            claim(tmp_path, optimizer={"lr": 1.0})
        assert (tmp_path / "try" / "config.json").read_bytes() == before
        assert claim(tmp_path, run={"resume": "never"}).folder.name == "try-2"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert claim(tmp_path).folder.name == "try"


def test_two_trainers_of_one_process_cannot_have_one_folder(tmp_path: Path) -> None:
    with (
        claim_run_dir(config(tmp_path)),
        pytest.raises(ConfigError, match="in use by this very process"),
        claim_run_dir(config(tmp_path)),
    ):
        pass


def test_a_forked_child_does_not_hold_the_folder(tmp_path: Path) -> None:
    ready, told = os.pipe()
    with claim_run_dir(config(tmp_path)):
        child = os.fork()
        if not child:
            os.write(told, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
    try:
        assert claim(tmp_path).folder.name == "try"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


# ---- a folder that cannot be written ---------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "try").write_text("a file is in the way")
    with pytest.raises(ConfigError, match=r"cannot write the run folder .*choose another with --run-dir"):
        claim(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
async def test_a_configuration_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await begin(tmp_path)
    before = (folder / "config.json").read_bytes()

    def refuse(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError, match=os.strerror(number)):
        claim(tmp_path, trainer={"steps": 200})
    with pytest.raises(ConfigError, match=os.strerror(number)):
        mark_finished(folder, {})
    monkeypatch.undo()
    assert (folder / "config.json").read_bytes() == before and not (folder / "finished").exists()
    assert not list(folder.glob(".*"))


FORBIDDEN = """
import sys
from pathlib import Path
from headrace.config.loading import build_config
from headrace.errors import ConfigError
from headrace.run.directory import claim_run_dir, describe_start

config = build_config({"run": {"dir": sys.argv[1], "name": "try"}})
for start in (describe_start, lambda config: claim_run_dir(config).__enter__()):
    try:
        start(config)
    except ConfigError as error:
        print(error)
"""


def obey_permissions() -> None:
    """Root may write anywhere, but for the right to do so."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        for right in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            libc.prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.parametrize("mode", [0o500, 0o000], ids=["read only", "closed"])
@pytest.mark.parametrize("below", ["", "deep"])
def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy_also_of_a_dry_run(
    tmp_path: Path, mode: int, below: str
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=mode)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        folder.chmod(mode | 0o055 if mode else mode)  # for all but its owner, which root no longer stands above
    command = [sys.executable, "-c", FORBIDDEN, str(folder / below)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=obey_permissions)
    said = f"cannot write the run folder {folder / below / 'try'}: Permission denied; make room or make it writable"
    assert [line.startswith(said) for line in done.stdout.splitlines()] == [True, True], done
    folder.chmod(0o700)


READ_ONLY = """
import sys
from headrace.cli.main import run
sys.exit(run(["train", "--resume", sys.argv[1]]))
"""


def test_a_file_system_that_is_really_read_only(tmp_path: Path) -> None:
    claim(tmp_path)
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    command = f"{mount} && exec {sys.executable} - {tmp_path / 'try'}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], input=READ_ONLY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "Read-only file system; make room or make it writable, or choose another with --run-dir" in done.stderr


# ---- starts that fail, and what Python gave --------------------------------------------------------------------------


def begun(tmp_path: Path, **objects: str) -> RunConfig:
    """A run that has a step behind it."""
    config = build_config({"run": {"dir": str(tmp_path), "name": "r"}})
    with claim_run_dir(config, objects=objects) as claim:
        (claim.folder / "checkpoints" / "step_000001").mkdir(parents=True)
        claim.begin()
    return config


def test_a_start_that_fails_leaves_the_files_of_a_run_as_they_were(tmp_path: Path) -> None:
    first = begun(tmp_path)
    stored = tmp_path / "r" / "config.json"
    kept = stored.read_text()
    longer = first.model_copy(update={"trainer": first.trainer.model_copy(update={"steps": 999})})
    with pytest.raises(ValueError, match="no such file"), claim_run_dir(longer):
        raise ValueError("no such file")
    assert stored.read_text() == kept
    with claim_run_dir(longer) as claim:
        claim.begin()
    assert stored.read_text() != kept


def test_what_python_gave_is_not_looked_up_by_name_when_the_run_is_resumed(tmp_path: Path) -> None:
    config = begun(tmp_path, workflow="add_up", tasks="generator")
    says = "started from Python, which gave it tasks generator; resume it from the same code"
    with pytest.raises(ConfigError, match=says), claim_run_dir(config, objects={"workflow": "add_up"}):
        pass
    with claim_run_dir(config, objects={"workflow": "other", "tasks": "list"}) as claim:
        assert claim.resumes
