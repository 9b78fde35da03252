"""What of verl the backend uses is there, under the names and parameters that it is used with."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from fakes import ROOT
from headrace.backends.verl.platform import choose_platform
from headrace.config.loading import build_config
from headrace.errors import ConfigError
from headrace.registry import load_object
from verl_pool import WHY, has_verl, verl_sections

SOURCES = sorted((ROOT / "src" / "headrace" / "backends" / "verl").glob("*.py"))
needs_verl = pytest.mark.skipif(not has_verl(), reason=WHY)


@pytest.fixture
def on_the_cpu() -> None:
    choose_platform(build_config(verl_sections(1)))


def imported(path: Path) -> set[str]:
    """`module:name` of everything that a file imports from verl."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^\s*from (verl[\w.]*) import (?:\(([^)]*)\)|(.+))", text, re.MULTILINE)
    names = [(module, name.strip()) for module, many, one in found for name in (many or one).split(",")]
    return {f"{module}:{name.split(' as ')[0]}" for module, name in names if name}


def test_everything_that_is_imported_from_verl_is_on_the_list() -> None:
    text = (ROOT / "src" / "headrace" / "backends" / "verl" / "used.py").read_text(encoding="utf-8")
    listed = {re.sub(r"_impl$", "", name) for name in re.findall(r'"verl[\w.]*:(\w+)', text)}
    listed |= {"tensordict_utils"}  # whose functions are listed
    names = set().union(*map(imported, SOURCES))
    assert len(names) > 10
    assert sorted(name for name in names if name.split(":")[1] not in listed) == []


@pytest.mark.usefixtures("on_the_cpu")
@needs_verl
def test_the_installed_verl_has_all_that_is_used() -> None:
    used = load_object("headrace.backends.verl.used:differences")
    assert version("verl") == load_object("headrace.backends.verl.used:TESTED")
    assert list(used()) == []


@pytest.mark.usefixtures("on_the_cpu")
@needs_verl
def test_what_another_version_changes_is_a_list_that_people_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = "verl.workers.engine_workers_tinker:TinkerTrainingWorker"
    calls = {f"{worker}.forward_backward": ("self", "batch"), f"{worker}.step": ("self",), "verl.nowhere:gone": ()}
    settings = {"verl.workers.config:HFModelConfig": ("path", "dtype_of_weights")}
    used = load_object("headrace.backends.verl.used:differences")
    first, second, third, fourth = used(calls, settings)
    # Ray adds a parameter to the methods of actors once there are any
    assert first.startswith(f"{worker}.forward_backward takes no batch; it has self, data")
    assert second == f"{worker}.step is gone" and third == "verl.nowhere:gone is gone"
    assert fourth.startswith("verl.workers.config:HFModelConfig has no field dtype_of_weights; it has ")
    module = "headrace.backends.verl.used"
    monkeypatch.setattr(f"{module}.TESTED", "0.8.0")
    monkeypatch.setattr(f"{module}.differences", lambda: iter([first, second]))
    with pytest.raises(ConfigError, match=r"these differ:\n  verl\.workers.* takes no batch"):
        load_object(f"{module}:require_all")()
