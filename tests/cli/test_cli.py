"""The command line as a user meets it: light, and one line for every mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli.doctor import EXTRAS
from headrace.cli.main import app, run
from headrace.cli.toml_text import to_toml
from headrace.config import RunConfig
from headrace.config.loading import build_config, field_paths, load_config

HEAVY = {"torch", "transformers", "numpy", "tensorboardX"}
Caught = pytest.CaptureFixture[str]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    workflow, sets = '[workflow]\njudger = "countdown"\n', '[eval.sets."dev set"]\ntasks = "countdown"\n'
    path.write_text(f'[run]\nname = "try"\n{workflow}[trainer]\nsteps = 3\n{sets}')
    return path


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_line_imports_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-c", "import headrace.cli.main"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in log.splitlines()}
    assert "cyclopts" in imported
    assert not imported & HEAVY


def test_a_dry_run_refuses_wrong_settings_and_names_without_importing_torch(run_file: Path):
    code = (
        "import sys; from headrace.cli.main import run; "
        f"code = run(['train', {str(run_file)!r}, '--dry-run', '--workflow.judger=cuontdown']); "
        "sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 2


def test_a_wrong_key_in_a_real_process_is_one_line_and_exit_2(run_file: Path):
    done = headrace("train", str(run_file), "--trainer.stpes", "3")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert 'unknown key "trainer.stpes" (did you mean "steps"?)' in done.stderr


def test_help_of_a_real_process_names_the_commands():
    done = headrace("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("train", "eval", "doctor", "model"))


def write(text: str) -> Callable[[Path], list[str]]:
    def words(run_file: Path) -> list[str]:
        run_file.write_text(text)
        return ["train", str(run_file), "--dry-run"]

    return words


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "misspelt key": (write("[trainer]\nstpes = 3\n"), 'did you mean "steps"?'),
    "misspelt section": (write("[trianer]\nsteps = 3\n"), 'did you mean "trainer"?'),
    "TOML syntax": (write("[trainer\n"), "is not valid TOML"),
    "wrong type": (write('[trainer]\nsteps = "many"\n'), "trainer.steps: input should be a valid integer"),
    "wrong combination": (write("[rollout]\ngroup_size = 1\n"), "at least 2 for grpo, got 1"),
    "missing file": (lambda f: ["train", str(f.with_name("rnu.toml"))], 'did you mean "run.toml"?'),
    "folder": (lambda f: ["train", str(f.parent)], "is a folder"),
    "no file": (lambda f: ["train"], "give a run file to train, or the folder of a run with --resume"),
    "settings before the file": (lambda f: ["train", "--trainer.steps", "2", str(f)], "the run file comes first"),
    "setting without value": (lambda f: ["train", str(f), "--trainer.steps"], "--trainer.steps needs a value"),
    "misspelt option": (lambda f: ["train", str(f), "--dryrun"], 'did you mean "--dry-run"?'),
    "misspelt option of eval": (lambda f: ["eval", str(f), "--chekpoint", "x"], 'did you mean "--checkpoint"?'),
    "stray word": (lambda f: ["train", str(f), "fast"], 'got "fast"'),
    "misspelt command": (lambda f: ["trian", str(f)], 'Did you mean "train"?'),
    "unknown option": (lambda f: ["algorithms", "--quickly"], "Unknown option: --quickly"),
    "unknown option of doctor": (lambda f: ["doctor", "--quickly"], "unknown option --quickly"),
    "unknown model": (lambda f: ["model", "get", "smolm2-135m"], 'did you mean "smollm2-135m"?'),
    "run folder without a name": (lambda f: ["train", str(f), "--run-dir", "/"], "--run-dir must name a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(run_file: Path, capsys: Caught, mistake: str):
    words, says = MISTAKES[mistake]
    assert run(words(run_file)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert out == ""


@contextmanager
def command_that_raises(error: BaseException) -> Iterator[str]:
    def explode() -> None:
        raise error

    app.command(explode, name="explode")
    yield "explode"
    del app["explode"]


def test_a_bug_keeps_its_traceback():
    with command_that_raises(ZeroDivisionError("a bug")) as command, pytest.raises(ZeroDivisionError):
        run([command])


def test_an_interrupt_outside_training_exits_130(capsys: Caught):
    with command_that_raises(KeyboardInterrupt()) as command:
        assert run([command]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_dry_run_prints_the_overrides_and_the_run_directory(run_file: Path, capsys: Caught):
    words = ["--trainer.steps", "7", "--optimizer.lr=2e-4", "--rollout.stop", '["END"]', "--dry-run"]
    assert run(["train", str(run_file), *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# run directory: {Path('runs') / 'try'}\n")
    assert "steps = 7  # default: 100" in out and "lr = 0.0002  # default: 1e-05" in out
    assert tomllib.loads(out)["rollout"]["stop"] == ["END"]


def test_run_dir_sets_folder_and_name_even_if_it_looks_like_a_number(run_file: Path, tmp_path: Path, capsys: Caught):
    assert run(["train", str(run_file), "--run-dir", str(tmp_path / "7"), "--dry-run"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)["run"]
    assert (printed["dir"], printed["name"]) == (str(tmp_path), "7")


def test_a_negative_value_is_a_value(run_file: Path, capsys: Caught):
    assert run(["train", str(run_file), "--run.seed", "-1", "--dry-run"]) == 0
    assert "seed = -1" in capsys.readouterr().out


def test_a_printed_configuration_gives_the_same_configuration_again(run_file: Path, tmp_path: Path):
    values = {"data": {"args": {"n": 4, "a b": ["ü", 'say "x"'], "deep": {"on": True}}}, "run": {"dir": str(tmp_path)}}
    for config in (load_config(run_file), build_config(values)):
        again = tmp_path / "again.toml"
        again.write_text(to_toml(config), encoding="utf-8")
        assert load_config(again) == config


def set_columns(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A console keeps the width that it was made with."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (app, app["train"]):
        monkeypatch.setattr(command, "_fallback_console", None)


def test_train_help_documents_every_setting(capsys: Caught, monkeypatch: pytest.MonkeyPatch):
    set_columns(monkeypatch, 300)
    assert run(["train", "--help", "all"]) == 0
    out = capsys.readouterr().out
    for path, field in field_paths():
        assert field.description, path
        assert " ".join(field.description.split()) in out, path
    for shown in ("[model]", "lora.rank = 0", "[eval.sets.NAME]", "steps = 100", "[int ≥ 0]"):
        assert shown in out


def test_train_help_shows_sections_and_one_of_them_in_full(capsys: Caught, monkeypatch: pytest.MonkeyPatch):
    set_columns(monkeypatch, 300)
    assert run(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "headrace train --help SECTION" in out and "Example" in out and "max_staleness" not in out
    for section in RunConfig.model_fields:
        assert f"[{section}]" in out
    assert run(["train", "--help", "trainer"]) == 0
    out = capsys.readouterr().out
    assert "max_staleness = 0" in out and "group_size" not in out
    assert run(["train", "--help", "model.lora"]) == 0
    out = capsys.readouterr().out
    assert "lora.rank = 0" in out and "lora.targets" in out and "dtype" not in out
    assert run(["train", "--help", "model.lora.rank"]) == 0
    assert "lora.targets" not in capsys.readouterr().out
    assert run(["train", "--help", "trianer"]) == 2
    assert 'did you mean "trainer"?' in capsys.readouterr().err


def test_train_help_fits_a_narrow_terminal(capsys: Caught, monkeypatch: pytest.MonkeyPatch):
    set_columns(monkeypatch, 80)
    run(["train", "--help"])
    run(["train", "--help", "all"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_model_list_shows_every_model_and_how_to_get_it(
    capsys: Caught, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    assert run(["model", "list"]) == 0
    out = capsys.readouterr().out
    assert "bundled" in out and "run `headrace model get smollm2-135m`" in out


def test_doctor_ends_with_a_verdict_that_matches_its_exit_code(capsys: Caught, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "300")
    code = run(["doctor"])
    out = capsys.readouterr().out
    assert all(word in out for word in ("Python", "cores", "sandbox", "threads", "extra local", "model bundled"))
    assert out.splitlines()[-1].startswith("ready for: headrace train" if code == 0 else "first: ")


@pytest.fixture
def without_local_extra(tmp_path: Path) -> dict[str, str]:
    """Environment of an interpreter that truly lacks torch and transformers: all other packages, linked."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("torch", "transformers")):
            (packages / entry.name).symlink_to(entry)
    source = Path(__file__).parents[2] / "src"
    cache = tmp_path / "cache"
    return {**os.environ, "PYTHONPATH": f"{source}:{packages}", "COLUMNS": "300", "HEADRACE_CACHE": str(cache)}


def test_without_torch_doctor_and_get_say_what_to_install(without_local_extra: dict[str, str]):
    def headrace_without(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-m", "headrace", *words]  # -S: leaves the environment's own packages out
        return subprocess.run(command, capture_output=True, text=True, check=False, env=without_local_extra)

    doctor = headrace_without("doctor")
    assert doctor.returncode == 1, doctor.stderr
    line = '.venv/bin/pip install -e ".[local]" -c constraints.txt'
    assert f"missing: torch, transformers ({line})" in doctor.stdout
    assert doctor.stdout.splitlines()[-1] == f"first: in the clone: {line}"
    get = headrace_without("model", "get", "smollm2-135m")
    assert get.returncode == 2 and line in get.stderr and get.stdout == ""


def test_doctor_knows_the_packages_of_every_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {
        extra: tuple(name for name in (re.split("[>=]", r)[0] for r in requirements) if not name.startswith("headrace"))
        for extra, requirements in project["optional-dependencies"].items()
        if extra != "dev"
    }
    assert declared == EXTRAS


def test_doctor_plans_the_memory_of_a_run_file(capsys: Caught):
    example = str(Path(__file__).parents[2] / "examples" / "countdown.toml")
    assert run(["doctor", "--plan", example, "--memory", "24"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("parameters", "optimizer", "activations", "logits", "cache", "fits: "))
    assert run(["doctor", "--plan", example, "--memory", "0.5"]) == 1
    assert "does not fit: " in (said := capsys.readouterr().out) and "backend.gradient_checkpointing = true" in said
    assert run(["doctor", "--memory", "24"]) == 2
    assert "give --plan FILE, too" in capsys.readouterr().err
