"""`headrace import`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import App, Parameter

from headrace.cli.help import examples
from headrace.cli.toml_text import toml_value
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.migration.carry import Imported, Line

import_app = App(name="import", help="Turn another trainer's configuration into a run file.")
_OPEN = 3
"""Exit code: the run file was written, and some of it is for the user to decide."""

_SECRET = ("token", "api_key", "password", "secret")
_File = Annotated[Path, Parameter(help="The configuration.")]
_Out = Annotated[Path | None, Parameter(help="Write the run file here, instead of printing it.")]
_Tasks = Annotated[int | None, Parameter(help="How many training tasks there are: epochs become steps by it.")]
_All = Annotated[
    bool, Parameter(name="--all", negative="", show_default=False, help="List settings without effect one by one, too.")
]


@import_app.command(
    name="verl",
    help_epilogue=examples(
        "python -m verl.trainer.main_ppo ... --cfg job --resolve > verl.yaml",
        "headrace import verl verl.yaml --tasks 7473 --out run.toml",
    ),
)
def import_verl(file: _File, /, *, out: _Out = None, tasks: _Tasks = None, all_: _All = False) -> int:
    """A resolved configuration of verl's PPO trainer (YAML, or as verl prints it when it starts)."""
    from headrace.migration.verl import import_verl

    return _import("verl", import_verl, file, out, tasks, all_)


@import_app.command(name="rllm", help_epilogue=examples("headrace import rllm rllm.yaml --tasks 1000 --out run.toml"))
def import_rllm(file: _File, /, *, out: _Out = None, tasks: _Tasks = None, all_: _All = False) -> int:
    """A resolved configuration of rLLM's trainer on verl (YAML)."""
    from headrace.migration.rllm import import_rllm

    return _import("rllm", import_rllm, file, out, tasks, all_)


@import_app.command(
    name="trl", help_epilogue=examples("headrace import trl grpo_config.json --tasks 1000 --out run.toml")
)
def import_trl(file: _File, /, *, out: _Out = None, tasks: _Tasks = None, all_: _All = False) -> int:
    """A GRPOConfig of TRL: the JSON or YAML of its to_dict()."""
    from headrace.migration.trl import import_trl

    return _import("trl", import_trl, file, out, tasks, all_)


def _import(
    trainer: str, carry_over: Callable[[dict[str, Any], int | None], Imported], file: Path, out: Path | None,
    tasks: int | None, every: bool,
) -> int:  # fmt: skip
    from headrace.config.loading import UNDECIDED
    from headrace.migration.read import read_settings

    if tasks is not None and tasks < 1:
        raise ConfigError(f"--tasks must be at least 1, got {tasks}")
    if out is not None:
        _require_new(out)
    made = carry_over(read_settings(file), tasks)
    text = "\n".join(_run_file(made, trainer, file)) + "\n"
    listed: TextIO = sys.stderr if out is None else sys.stdout  # `> run.toml` takes the run file alone
    if out is None:
        print(text, end="", flush=True)
    else:
        out.write_text(text, encoding="utf-8")
    for line in _listing(made, every):
        print(line, file=listed)
    if out is not None:
        first = f"decide what is in its list `{UNDECIDED}`, then " if made.open else ""
        print(f"\nwrote {out}; next: {first}headrace train {out} --dry-run", file=listed)
    return _OPEN if made.open else 0


def _require_new(out: Path) -> None:
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it, such as {out / 'run.toml'}")
    if out.exists():
        raise ConfigError(f"{out} exists already; give another name with --out, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it, or give another one")


def _run_file(made: Imported, trainer: str, file: Path) -> Iterator[str]:
    """The settings by section, each with the key that it comes from."""
    from headrace.config.loading import UNDECIDED

    origin: dict[str, list[str]] = {}
    for line in made.lines:
        origin.setdefault(line.ours, []).append(line.key)
    yield f"# from {file.name}, a configuration of {trainer}"
    if made.open:
        yield "# decide each of these, then remove it: no run starts before the list is empty"
        yield from (f"{UNDECIDED} = [", *(f"  {toml_value(one)}," for one in made.open), "]")
    sections: dict[str, list[str]] = {}
    for key, value in made.values.items():
        section, _, name = key.rpartition(".")
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            for inner, table in value.items():
                lines = [f"{one} = {toml_value(item)}" for one, item in table.items()]
                sections[f"{key}.{toml_key(inner)}"] = lines
            continue
        note = f"  # {', '.join(origin[key])}" if key in origin else ""
        sections.setdefault(section, []).append(f"{name} = {toml_value(value)}{note}")
    for section in sorted(sections, key=_place):
        yield from ("", f"[{section}]", *sections[section])


def toml_key(name: str) -> str:
    """A key of a table, quoted if it must be."""
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else toml_value(name)


def _place(section: str) -> tuple[int, str]:
    from headrace.config import RunConfig

    return list(RunConfig.model_fields).index(section.partition(".")[0]), section


def _listing(made: Imported, every: bool) -> Iterator[str]:
    """What became of every setting, line by line; those without effect only counted, unless all are wanted."""
    from headrace.migration.carry import Fate

    for fate in Fate:
        lines = [line for line in made.lines if line.fate is fate]
        if not lines:
            continue
        yield f"\n{fate} ({len(lines)}):"
        if fate is Fate.IDLE and not every:
            counts = Counter(line.note for line in lines)
            yield from (f"  {count:4} {why}" for why, count in counts.most_common())
            yield "  (--all lists them one by one)"
        else:
            yield from (f"  {_shown(line, made)}" for line in lines)
    if made.open:
        yield f"\nfor you to decide ({len(made.open)}):"
        yield from (f"  {undecided}" for undecided in made.open)


def _shown(line: Line, made: Imported) -> str:
    value = "none" if line.value is None else toml_value(line.value)
    if line.key.lower().endswith(_SECRET) and isinstance(line.value, str):
        value = "…"
    there = f"{line.key} = {value}"
    if not line.ours:
        return f"{there}: {line.note}"
    found = made.values.get(line.ours)
    here = line.ours if found is None or isinstance(found, dict) else f"{line.ours} = {toml_value(found)}"
    return f"{there} → {here}" + (f" ({line.note})" if line.note else "")
