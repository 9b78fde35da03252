"""What is installed: ranges that were tested, a pin for every package, hashes for every pin, lines that are true."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from lock import ALL, BUILD, CONSTRAINTS, TOOLS, UNHASHED, read_pins, wanted
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from headrace.cli.doctor import EXTRAS
from headrace.errors import install_line
from headrace.registry import _EXTRA_OF_PACKAGE

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
DECLARED = [(group, Requirement(line)) for group, lines in GROUPS.items() for line in lines]
OTHERS = [(group, one) for group, one in DECLARED if one.name != "headrace"]
APART = (
    "wandb",
    "mlflow",
    "trackio",
    "tensorboard",
    "verl",
)  # extras that are installed, and tested, on their own: they are large, or want other versions
EXACT = ("verl",)
"""Packages of which another version is another program to us."""
PINS = read_pins(CONSTRAINTS)
PINS_APART = {
    **read_pins(ROOT / "requirements" / "trackers.txt"),
    **read_pins(ROOT / "benchmarks" / "verl_requirements.txt"),
}


@pytest.mark.parametrize(("group", "one"), OTHERS, ids=[f"{group}:{one.name}" for group, one in OTHERS])
def test_a_range_begins_at_what_is_tested_and_has_an_end(group: str, one: Requirement) -> None:
    pinned = Version((PINS_APART if group in APART else PINS)[canonicalize_name(one.name)])
    assert one.specifier.contains(pinned, prereleases=True)
    if one.name in EXACT:
        assert str(one.specifier) == f"=={pinned}"
        return
    (lowest,) = [Version(part.version) for part in one.specifier if part.operator == ">="]
    (end,) = [Version(part.version) for part in one.specifier if part.operator == "<"]
    assert lowest.release[:2] == (*pinned.release, 0)[:2] or lowest.release == pinned.release[:1], "never tested"
    assert not one.specifier.contains(f"{pinned.major + 1}.0") and end > pinned


def test_torch_stays_within_the_minor_version_that_is_tested() -> None:
    (torch,) = [one for group, one in DECLARED if one.name == "torch"]
    assert torch.specifier.contains("2.13.1") and not torch.specifier.contains("2.14.0")
    assert not torch.specifier.contains("2.12.9")


def test_nothing_is_declared_twice() -> None:
    for group, lines in GROUPS.items():
        names = [canonicalize_name(Requirement(line).name) for line in lines]
        assert len(names) == len(set(names)), group


def _needed(name: str, extras: frozenset[str], seen: dict[str, Distribution]) -> None:
    """All installed packages that a package needs here, by name."""
    found = seen[canonicalize_name(name)] = distribution(name)
    for one in map(Requirement, found.requires or ()):
        marks = [{"extra": extra} for extra in (extras or {""})]
        if one.marker is not None and not any(one.marker.evaluate(mark) for mark in marks):
            continue
        if canonicalize_name(one.name) not in seen:
            _needed(one.name, frozenset(one.extras), seen)


def test_every_package_that_is_installed_is_pinned_at_its_version() -> None:
    seen: dict[str, Distribution] = {}
    for group, one in OTHERS:
        if group not in APART:
            _needed(one.name, frozenset(one.extras), seen)
    here = {name: found.version.partition("+")[0] for name, found in seen.items()}
    by_torch = ("nvidia-", "triton", "cuda-")  # pinned by the CUDA build of torch itself
    unpinned = {name: version for name, version in here.items() if PINS.get(name) != version}
    assert not {name: version for name, version in unpinned.items() if not name.startswith(by_torch)}
    build = [Requirement(line) for line in PROJECT["build-system"]["requires"]]
    assert [one.name for one in build] == ["hatchling"] and build[0].specifier.contains(PINS["hatchling"])


def test_every_pin_but_torch_has_hashes_and_the_files_agree() -> None:
    tools, rest = read_pins(BUILD), read_pins(ALL)
    assert set(tools) == set(TOOLS) and not set(tools) & set(rest)
    assert {**tools, **rest} == {name: version for name, version in PINS.items() if name not in UNHASHED}
    for file in (BUILD, ALL):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        entries = "\n".join(lines).replace(" \\\n", " ").splitlines()
        for entry in entries:
            assert re.fullmatch(r"[a-z0-9-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", entry), entry
    assert not re.search(
        r"https?:|file:|index-url|find-links", "".join(f.read_text() for f in (CONSTRAINTS, BUILD, ALL))
    )


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        ("a-1.0-py3-none-any.whl", True), ("a-1.0.tar.gz", True), ("a-1.0-cp39-abi3-macosx_11_0_arm64.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", True), ("a-1.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp39-cp39-manylinux_2_28_x86_64.whl", False), ("a-1.0-cp311-cp311-win_amd64.whl", False),
        ("a-1.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
    ],
)  # fmt: skip
def test_hashes_are_kept_of_files_that_can_be_installed(file: str, kept: bool) -> None:
    assert wanted(file) == kept


def test_setup_installs_by_hash() -> None:
    shown = subprocess.run(["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line.strip() for line in shown.splitlines() if " install " in line]
    assert len(installs) == 3 and all("--no-deps" in line or "torch==" in line for line in installs), installs
    assert "--require-hashes" in installs[0] and "--no-build-isolation" in installs[0]


def test_every_hint_names_an_extra_that_there_is() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(_EXTRA_OF_PACKAGE.values()) <= set(extras) and set(EXTRAS) <= set(extras)
    assert install_line("mcp") == '.venv/bin/pip install -e ".[mcp]" -c constraints.txt'


def test_nothing_says_that_headrace_is_on_an_index() -> None:
    folders = ("src", "docs", "examples", "benchmarks", "scripts", "tests")
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    for file in files:
        if file.suffix in (".py", ".md", ".toml") and file != Path(__file__):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"pip install [\"']?headrace|headrace\[", text), file
