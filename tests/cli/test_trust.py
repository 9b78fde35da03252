"""Run folders of others: what they name is not run without a word from the user."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import run
from headrace.cli.trust import code_names, why_not_ours

MARK = "import pathlib; pathlib.Path({!r}).write_text('ran')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of this user's that names code which leaves a mark when it is imported."""
    (tmp_path / "own.py").write_text(MARK.format(str(tmp_path / "mark")))
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    servers = {"one": {"command": ["sh", "-c", "true"]}}
    workflow = {"name": f"{tmp_path / 'own.py'}:solve", "args": {"mcp": servers}, "judger": "numeric"}
    (folder / "config.json").write_text(json.dumps({"workflow": workflow, "backend": {"name": f"{tmp_path}/own.py:B"}}))
    return folder


def foreign(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another user had started us."""
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's files are trusted by all
        os.chown(folder / "config.json", 4321, 4321)


def test_ones_own_folder_is_used_without_a_word(folder: Path) -> None:
    assert why_not_ours(folder) is None
    assert why_not_ours(folder / "not there") is None


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o702])
def test_a_folder_or_config_that_others_can_write_is_not_ones_own(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert f"can be written by others (mode {mode:o})" in (why_not_ours(folder) or "")
    folder.chmod(0o755)
    (folder / "config.json").chmod(0o666)
    assert "config.json can be written by others" in (why_not_ours(folder) or "")


def test_a_folder_of_another_user_is_not_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(folder, monkeypatch)
    assert "belongs to" in (why_not_ours(folder) or "")


@pytest.mark.parametrize(("name", "members", "private"), [("me", [], True), ("me", ["you"], False), ("all", [], False)])
def test_a_group_of_ones_own_may_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], private: bool
) -> None:
    class Named:
        pw_gid, pw_name, gr_name, gr_mem = folder.stat().st_gid, "me", name, members

    monkeypatch.setattr("headrace.cli.trust.pwd.getpwuid", lambda _: Named)
    monkeypatch.setattr("headrace.cli.trust.grp.getgrgid", lambda _: Named)
    folder.chmod(0o775)
    assert (why_not_ours(folder) is None) == private


def test_what_a_config_names_is_listed(folder: Path) -> None:
    own = folder.parent / "own.py"
    assert sorted(code_names(folder)) == sorted([f'"{own}:solve"', f'"{own}:B"', '"sh -c true"'])


COMMANDS = [["train", "--resume", "RUN"], ["train", "--resume", "RUN", "--dry-run"], ["eval", "RUN"], ["replay", "RUN"]]
COMMANDS += [["export", "RUN", "OUT"]]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_off_a_terminal_another_ones_code_is_not_imported(folder: Path, capsys: Any, words: list[str]) -> None:
    folder.chmod(0o777)
    given = [word.replace("RUN", str(folder)).replace("OUT", str(folder.parent / "out")) for word in words]
    assert run(given) == 2
    said = capsys.readouterr().err
    assert "add --trust" in said and "own.py:solve" in said and not (folder.parent / "mark").exists()
    assert run([*given, "--trust"]) == 2  # it holds no run and its code not what it names, but was looked at
    assert "--trust" not in capsys.readouterr().err


class Terminal:
    """Somebody who answers."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._answer


@pytest.mark.parametrize(
    ("answer", "used"), [("y\n", True), ("yes\n", True), ("\n", False), ("", False), ("n\n", False)]
)
def test_on_a_terminal_the_user_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, answer: str, used: bool
) -> None:
    folder.chmod(0o777)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert run(["replay", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "Run them? [y/N]" in said and ("was not used" in said) != used


def test_trust_without_a_run_folder_is_refused(capsys: Any) -> None:
    for words in (["train", "file.toml", "--trust"], ["eval", "file.toml", "--trust"]):
        assert run(words) == 2 and "leave it out" in capsys.readouterr().err
