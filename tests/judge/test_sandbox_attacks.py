"""Every attack of `sandbox_attacks.py`, in both modes of the sandbox, as root and as an ordinary user."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sandbox_attacks import SECRET

_NOBODY = 65534
_TESTS = Path(__file__).parents[1]
_BIND, _REC, _PRIVATE, _NEWNS = 4096, 16384, 1 << 18, 0x20000
_LONGEST_S = 300.0


def _readable_by_all(path: str) -> bool:
    return all(Path(folder).stat().st_mode & 0o001 for folder in (path, *map(str, Path(path).parents)))


def _move_python(prefix: str, elsewhere: str) -> None:
    """In a process of its own: show the interpreter's folder under a path that everyone may go to."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = (
        libc.unshare(_NEWNS)
        or libc.mount(b"none", b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None)
        or libc.mount(prefix.encode(), elsewhere.encode(), None, ctypes.c_ulong(_BIND | _REC), None)
    )
    if failed:
        raise OSError(ctypes.get_errno(), "the interpreter cannot be shown to another user")


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _ways(user: str, folder: Path) -> tuple[str, Any]:
    """The interpreter to start, and what to do before."""
    interpreter = os.path.realpath(sys.executable)
    if user == "root":
        return sys.executable, None
    if os.geteuid() != 0:
        return sys.executable, None
    os.chown(folder, _NOBODY, _NOBODY)
    prefix = os.path.realpath(sys.base_prefix)
    if _readable_by_all(interpreter):
        return interpreter, _become_nobody
    elsewhere = tempfile.mkdtemp(prefix="headrace-python-", dir="/tmp")
    os.chmod(elsewhere, 0o755)

    def before() -> None:
        _move_python(prefix, elsewhere)
        _become_nobody()

    return elsewhere + interpreter.removeprefix(prefix), before


@functools.cache
def outcome(mode: str, user: str) -> dict[str, Any]:
    """What the driver reports, once for all rows."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("these tests do not run as root")
    with tempfile.TemporaryDirectory(prefix="headrace-attacks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.chmod(folder / "tmp", 0o777)
        interpreter, before = _ways(user, folder)
        environment = {
            "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent / "src"), *filter(None, sys.path)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder / "tmp"),
            "MY_SECRET": SECRET,
        }
        command = [interpreter, str(_TESTS / "sandbox_attacks.py"), mode, name]
        ran = subprocess.run(
            command, env=environment, preexec_fn=before, capture_output=True, text=True, timeout=_LONGEST_S, cwd="/"
        )
        if interpreter.startswith("/tmp/headrace-python-"):
            Path(interpreter.split("/bin/")[0]).rmdir()
    if ran.returncode != 0 and "no sandbox works here" in ran.stdout + ran.stderr:
        pytest.skip(f"mode {mode} does not work here")
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


both = pytest.mark.parametrize("mode", ["namespace", "seccomp"])
users = pytest.mark.parametrize("user", ["root", "ordinary"])


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
@both
@users
def test_every_attack_gets_the_verdict_that_it_deserves_and_nothing_more(mode: str, user: str) -> None:
    found = outcome(mode, user)
    assert found["user"] == (0 if user == "root" else _NOBODY if os.geteuid() == 0 else os.geteuid())
    wrong = {name: share for name, share in found["shares"].items() if share != found["expected"][name]}
    assert not wrong
    assert found["intact"] and found["mode"] == "0o100600", "a program has changed the driver or its file"
    assert found["files"] == ["script", "secret", "tmp"] and not found["left"]
    assert found["processes"] == 0 and not found["folders"]
