"""Every command with every kind of wrong file: one message with the problem and the value, a code, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.main import run

CONTENT: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "binary": bytes(range(256)) * 20,
    "not UTF-8": 'name = "é"\n'.encode("latin-1"),
    "a list": b"[1, 2]",
    "a number": b"3",
    "null": b"null",
    "another object": b'{"a": 1}',
    "deep JSON": b"[" * 100_000,
    "deep TOML": b"a = " + b"[" * 20_000,
    "a number of 5000 digits": b'{"step": ' + b"9" * 5000 + b"}",
    "words": b"hello world\n",
}
Words = Callable[[Path], list[str]]
OF_FILES: dict[str, tuple[str, Words]] = {
    "train": ("x.toml", lambda f: ["train", str(f), "--dry-run"]),
    "sft": ("x.toml", lambda f: ["sft", str(f), "--dry-run"]),
    "eval": ("x.toml", lambda f: ["eval", str(f)]),
    "simulate": ("x.toml", lambda f: ["simulate", str(f)]),
    "data inspect": ("x.toml", lambda f: ["data", "inspect", str(f)]),
    "data inspect of a source": ("x.jsonl", lambda f: ["data", "inspect", str(f)]),
    "compare": ("x.json", lambda f: ["compare", str(f), str(f)]),
    "ledger": ("ledger.sqlite", lambda f: ["ledger", str(f)]),
    "replay": ("x", lambda f: ["replay", str(f)]),
    "export": ("x", lambda f: ["export", str(f), str(f.parent / "out")]),
    "train --resume": ("x", lambda f: ["train", "--resume", str(f)]),
    "model get": ("x", lambda f: ["model", "get", str(f)]),
    "serve tinker": ("x", lambda f: ["serve", "tinker", "--model", str(f), "--port", "0"]),
    "serve openai": ("x", lambda f: ["serve", "openai", str(f), "--port", "0"]),
}
OF_RUNS: dict[str, Words] = {
    "ledger": lambda f: ["ledger", str(f)],
    "ledger --export": lambda f: ["ledger", str(f), "--export", str(f.parent / "e.jsonl")],
    "replay": lambda f: ["replay", str(f)],
    "export": lambda f: ["export", str(f), str(f.parent / "out")],
    "eval": lambda f: ["eval", str(f)],
    "train --resume": lambda f: ["train", "--resume", str(f)],
    "compare": lambda f: ["compare", str(f), f"{f}@1"],
    "serve openai": lambda f: ["serve", "openai", str(f), "--port", "0"],
}
FINE = {(command, "empty") for command in ("train", "sft", "simulate", "data inspect")}  # nothing set is all defaults


def check(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = run(words)  # an exception that is not explained would come out here
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.splitlines()[-1].startswith("error: ") and len(err) > len("error: .....")


@pytest.mark.parametrize("content", [*CONTENT, "a folder"])
@pytest.mark.parametrize("command", OF_FILES)
def test_a_wrong_file_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, content: str
) -> None:
    if (command, content) in FINE:
        pytest.skip("no mistake")
    monkeypatch.chdir(tmp_path)
    name, words = OF_FILES[command]
    path, data = tmp_path / name, CONTENT.get(content)
    if content == "a folder":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)
    if command.startswith("data inspect of") and path.suffix == ".jsonl" and path.is_file():
        # its bad rows are what one looks at it for: shown, and no failure
        assert run(words(path)) in (0, 2)
        return
    check(words(path), capsys)


@pytest.mark.parametrize("content", [*CONTENT, "a folder"])
@pytest.mark.parametrize("command", OF_RUNS)
def test_a_damaged_run_folder_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, content: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, data = tmp_path / "run", CONTENT.get(content)
    checkpoint = folder / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    for name in ("config.json", "ledger.sqlite", "metrics.jsonl", "checkpoints/step_000001/checkpoint.json",
                 "checkpoints/step_000001/trainer.json"):  # fmt: skip
        if content == "a folder":
            (folder / name).mkdir()
        elif data is not None:
            (folder / name).write_bytes(data)
    check(OF_RUNS[command](folder), capsys)


VALUES: dict[str, tuple[list[str], str]] = {
    "url": (["eval", "RUN", "--url", "nonsense", "--model", "x"], "http://"),
    "port": (["serve", "tinker", "--port", "99999999"], "port"),
    "long name": (["train", "a" * 5000], "File name too long"),
    "folder in a file": (["train", "RUN", "--run-dir", "/dev/null/x"], "--run-dir"),
    "no folder for the output": (["eval", "RUN", "--json", "/nosuch/x.json"], "/nosuch"),
    "source": (["data", "inspect", "nosuch"], "nosuch"),
    "arguments of a source": (["data", "inspect", "countdown", "--args", "nosuch = 1"], "nosuch"),
    "TOML of the arguments": (["data", "inspect", "countdown", "--args", "size = ["], "--args"),
    "steps": (["ledger", ".", "--steps", "a:b", "--export", "x.jsonl"], '"a:b"'),
    "chart": (["simulate", "RUN", "--chart", "x.bmp"], "x.bmp"),
}


@pytest.mark.parametrize(("words", "says"), VALUES.values(), ids=list(VALUES))
def test_a_wrong_value_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text('workflow.judger = "countdown"\n[eval.sets.dev]\ntasks = "countdown"\n')
    assert run([str(file) if word == "RUN" else word for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_without_a_home_the_cache_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert run(["model", "get", "smollm2-135m"]) == 2
    assert "set HEADRACE_CACHE" in capsys.readouterr().err


def test_nothing_is_announced_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting that only the backend's own check refuses: it comes alone, without a word of loading and watching."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('data.tasks = "countdown"\nworkflow.judger = "countdown"\n')
    assert run(["train", "run.toml", "--backend.name=fsdp", "--backend.ranks=3", "--backend.shard=2"]) == 2
    shown = capsys.readouterr()
    assert "is no multiple of it" in shown.err and "watch it" not in shown.out + shown.err
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())
