"""The pages in docs/ and the README: what they show must parse, run and lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from headrace import registry
from headrace.algorithms import overview
from headrace.cli.main import app
from headrace.config.loading import build_config, field_paths, load_config
from headrace.config.rules import check_settings
from headrace.errors import ConfigError, ModelError
from headrace.models.catalog import resolve_model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = {
    "objective": "Objectives",
    "estimator": "Estimators",
    "loss": "Losses",
    "correction": "Corrections",
    "kl": "KL to a reference",
    "filter": "Filters",
}
NUMBERS_ONLY = {"docs/results.md"}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUNS = re.compile(r"^# runs: (\d+) steps$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    number: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For test names and messages."""
        return f"{self.page.relative_to(ROOT)}-{self.number}"

    @property
    def steps(self) -> int | None:
        """Training steps that the block says it runs; None for one that needs no model."""
        found = _RUNS.search(self.text)
        return int(found[1]) if found else None


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(*languages: str) -> list[Block]:
    return [
        Block(page, number, *match.groups())
        for page in PAGES
        for number, match in enumerate(_FENCE.finditer(read(page)), 1)
        if match[1] in languages
    ]


def each(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=lambda block: block.where)


def missing_model() -> str:
    """Why the bundled model cannot be used, if it cannot."""
    try:
        resolve_model("bundled")
    except ModelError as error:
        return str(error)
    return ""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run a block in, with the examples beside it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    return tmp_path


# ---- examples --------------------------------------------------------------------------------------------------------


@each(blocks("toml"))
def test_a_toml_block_is_a_valid_run_file(block: Block) -> None:
    build_config(tomllib.loads(block.text), where=block.where)


@each(blocks("python"))
def test_a_python_block_runs(block: Block, workplace: Path) -> None:
    if block.steps is not None and missing_model():
        pytest.skip(f"runs the bundled model, which is not there: {missing_model()}")
    unmarked_training = block.steps is None and ".fit(" in block.text
    name = "agent" if unmarked_training else "__main__"  # what stands behind the guard is for the slow test
    exec(compile(block.text, block.where, "exec"), {"__name__": name})


@each([block for block in blocks("python") if block.page.parent.name == "docs"])
def test_a_block_that_trains_says_so_and_is_short(block: Block) -> None:
    if ".fit(" in block.text:
        assert block.steps is not None, "mark it with `# runs: N steps`"
    assert (block.steps or 0) <= 5


@pytest.mark.slow
@each([block for block in blocks("python") if block.page.name == "README.md" and ".fit(" in block.text])
def test_the_readme_trains_an_agent(block: Block, workplace: Path) -> None:
    if missing_model():
        pytest.skip(f"runs the bundled model, which is not there: {missing_model()}")
    exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})


def test_every_page_has_a_block_that_runs() -> None:
    shown = {str(block.page.relative_to(ROOT)) for block in blocks("python")}
    assert sorted({str(page.relative_to(ROOT)) for page in PAGES} - shown - NUMBERS_ONLY) == []


# ---- commands --------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    """Every `headrace …` line of the shell blocks, as words."""
    return [
        (block.where, shlex.split(line, comments=True))
        for block in blocks("bash", "sh", "")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith("headrace ")
    ]


def is_setting(key: str) -> bool:
    """Whether `--key value` sets something; what is inside a free table is for its owner to know."""
    for path, field in field_paths():
        if key == path:
            return True
        if key.startswith(f"{path}.") and get_origin(field.annotation) is dict:
            inner = get_args(field.annotation)[1]
            if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
                return True
            return key.removeprefix(f"{path}.").partition(".")[2] in dict(field_paths(inner))
    return False


@pytest.mark.parametrize(("where", "words"), commands(), ids=lambda value: " ".join(value[1:3]) if value[1:] else "")
def test_a_command_exists_and_so_do_its_options_and_settings(where: str, words: list[str]) -> None:
    command = app
    rest = words[1:]
    while rest and not rest[0].startswith("-") and rest[0] in command:
        command = command[rest.pop(0)]
    assert command is not app or rest[0] in app, f"{where}: {words}"
    known = {name for argument in command.assemble_argument_collection() for name in argument.names}
    options = [word[2:].partition("=")[0] for word in rest if word.startswith("--")]
    for option in options:
        assert is_setting(option) if "." in option else f"--{option}" in {*known, "--help"}, f"{where}: --{option}"
    if rest and (ROOT / rest[0]).is_file():
        load_config(ROOT / rest[0], _settings(rest[1:]))


def _settings(words: list[str]) -> list[str]:
    """The words without the command's own options (and their values)."""
    kept: list[str] = []
    own = False
    for word in words:
        if word.startswith("--"):
            own = "." not in word.partition("=")[0]
        if not own:
            kept.append(word)
    return kept


# ---- links -----------------------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """A heading as GitHub links to it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(line.lstrip("#")) for line in _FENCE.sub("", read(page)).splitlines() if line.startswith("#")}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for link in _LINK.findall(_FENCE.sub("", read(page))):
            if not link.startswith(("http://", "https://", "mailto:")):
                yield page, link


@pytest.mark.parametrize(("page", "link"), list(links()), ids=lambda value: getattr(value, "name", value))
def test_a_link_leads_somewhere(page: Path, link: str) -> None:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    assert target.exists(), f"{page.name}: {link}"
    if anchor:
        assert anchor in anchors(target), f"{page.name}: {link}"


# ---- completeness ----------------------------------------------------------------------------------------------------


def section(page: str, title: str) -> str:
    """The text under a second-level heading."""
    _, found, rest = read(ROOT / "docs" / page).partition(f"\n## {title}\n")
    assert found, f'docs/{page} has no section "{title}"'
    return rest.partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the table rows of a text."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("entry", overview.algorithms(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_algorithm_is_documented(entry: overview.Algorithm) -> None:
    text = section("algorithms.md", SECTIONS[entry.kind])
    titles = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    documented = {
        name for title in (*titles, *(row[0] for row in rows(text))) for name in re.findall(r"`(\w+)`", title)
    }
    assert entry.name in documented


def test_every_knob_of_the_algorithms_is_documented() -> None:
    text = read(ROOT / "docs" / "algorithms.md")
    kept = ("algorithm.", "dpo.", "distill.", "sft.", "filters.")
    keys = [path for path, _ in field_paths() if path.startswith(kept)]
    named = {word for code in re.findall(r"`([^`]+)`", _FENCE.sub("", text)) for word in re.findall(r"[a-z_]+", code)}
    assert [key for key in keys if key.rsplit(".", 1)[-1] not in named] == []


REFUSED = [shlex.split(row[0].strip("`")) for row in rows(section("algorithms.md", "Combinations that are refused"))]


@pytest.mark.parametrize("words", [words for words in REFUSED if words[0].startswith("--")], ids=" ".join)
def test_a_combination_that_the_docs_call_refused_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        check_settings(build_config({}, words), ())


def test_the_walk_of_a_task_names_each_file_once_and_all_exist() -> None:
    named = re.findall(r"`(\w+(?:/\w+)+\.py)`", section("architecture.md", "From a task to trained weights"))
    assert len(named) >= 20 and len(named) == len(set(named))
    assert [name for name in named if not (ROOT / "src" / "headrace" / name).is_file()] == []
