"""Names to objects, and what is said when there is none."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.errors import ConfigError, HeadraceError, MissingExtraError
from headrace.registry import load_object, names, nearest, register, resolve

KINDS = ("backend", "engine", "workflow", "judger", "tasks", "objective", "estimator", "loss", "tracker")


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a user works in, with a module of theirs."""
    (tmp_path / "own_parts.py").write_text("class Judge:\n    strict = True\n\ndef score(task, text): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # as for a console script
    for module in [name for name in sys.modules if name.startswith(("own_", "headrace_user_own_"))]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_name_leads_to_an_object(kind: str) -> None:
    assert names(kind) == sorted(names(kind)) and names(kind)
    for name in names(kind):
        if kind == "tracker" and find_spec(name) is None and name in ("wandb", "mlflow", "trackio"):
            with pytest.raises(
                MissingExtraError, match=rf'"{name}" is not installed.*\[{name}\]'
            ):  # an extra of its own
                resolve(kind, name)
            continue
        assert callable(resolve(kind, name)), name


def test_an_unknown_name_gets_the_nearest_one_and_all_that_are_known() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve("estimator", "reinforced")
    said = str(raised.value)
    assert said.startswith('unknown estimator "reinforced" (did you mean "reinforce"?); known: ')
    assert ", ".join(names("estimator")) in said and '"module:object"' in said and "\n" not in said


def test_a_name_that_is_like_none_gets_no_suggestion() -> None:
    assert nearest("zzz", ["grpo", "reinforce"]) == ""
    with pytest.raises(ConfigError) as raised:
        resolve("loss", "zzz")
    assert "did you mean" not in str(raised.value)


def test_names_of_other_kinds_do_not_count() -> None:
    with pytest.raises(ConfigError, match='unknown judger "grpo"'):
        resolve("judger", "grpo")


def test_an_object_or_a_path_can_be_registered(user_folder: Path) -> None:
    register("own kind", "thing", 3)
    register("own kind", "judge", "own_parts:Judge")
    assert names("own kind") == ["judge", "thing"]
    assert resolve("own kind", "thing") == 3
    assert resolve("own kind", "judge").strict is True


def test_a_registered_name_goes_before_a_built_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.registry._registered", {})
    register("estimator", "grpo", len)
    assert resolve("estimator", "grpo") is len


def test_an_installed_package_adds_names_by_entry_points(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = user_folder / "own_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.judger]\nstrict = own_parts:Judge\n")
    monkeypatch.syspath_prepend(user_folder)
    assert "strict" in names("judger")
    assert resolve("judger", "strict").strict is True


def test_a_module_in_the_users_folder_is_found(user_folder: Path) -> None:
    assert resolve("judger", "own_parts:score")(None, "") == 1.0
    assert resolve("judger", "own_parts:Judge.strict") is True


def test_a_file_is_found_and_loaded_once(user_folder: Path) -> None:
    for path in ("own_parts.py", "./own_parts.py", str(user_folder / "own_parts.py")):
        assert resolve("judger", f"{path}:Judge") is resolve("judger", "own_parts.py:Judge")


def test_two_files_of_one_name_are_distinguished(user_folder: Path) -> None:
    (user_folder / "other").mkdir()
    (user_folder / "other" / "own_parts.py").write_text("def score(task, text): return 2.0\n")
    assert resolve("judger", "own_parts.py:score")(None, "") == 1.0
    assert resolve("judger", "other/own_parts.py:score")(None, "") == 2.0
    assert resolve("judger", "own_parts.py:score")(None, "") == 1.0


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("own_parts:scroe", '"own_parts" has no "scroe" (did you mean "score"?)'),
        ("own_parts.py:scroe", '"own_parts.py" has no "scroe" (did you mean "score"?)'),
        ("own_parts:Judge.lenient", '"own_parts" has no "Judge.lenient"'),
        ("own_prats:score", 'cannot import "own_prats": there is no module "own_prats"'),
        ("own_parts.deeper:score", 'cannot import "own_parts.deeper"'),
        ("own_prats.py:score", "there is no file "),
        ("own_parts", 'is not of the form "module:object" or "file.py:object"'),
        (":score", 'is not of the form "module:object"'),
        ("own_parts:", 'is not of the form "module:object"'),
    ],
)
def test_a_wrong_path_is_one_sentence(user_folder: Path, path: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_object(path)
    assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("package", "extra"), [("torch", "local"), ("gguf", "gguf"), ("matplotlib", "plot")])
def test_a_missing_package_is_named_with_the_extra_to_install(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    (user_folder / "own_needy.py").write_text(f"import {package}.something\n")
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(MissingExtraError) as raised:
        load_object("own_needy:anything")
    line = f'.venv/bin/pip install -e ".[{extra}]" -c constraints.txt'
    assert str(raised.value) == f'"{package}" is not installed, which own_needy needs; in the clone: {line}'


def test_a_missing_import_inside_the_users_code_keeps_its_traceback(user_folder: Path) -> None:
    (user_folder / "own_broken.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package") as raised:
        load_object("own_broken:anything")
    assert not isinstance(raised.value, HeadraceError)


def test_a_file_that_breaks_is_loaded_again_next_time(user_folder: Path) -> None:
    path = user_folder / "own_late.py"
    path.write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError, match="not yet"):
        load_object("own_late.py:ready")
    path.write_text("ready = True\n")
    assert load_object("own_late.py:ready") is True
