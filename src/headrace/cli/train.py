"""`headrace train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from headrace.cli.help import print_settings
from headrace.errors import ConfigError
from headrace.registry import nearest

if TYPE_CHECKING:
    from headrace.config import RunConfig

USAGE = "Usage: headrace train FILE.toml [--section.key value ...] [OPTIONS]"
SFT_USAGE = "Usage: headrace sft FILE.toml [--section.key value ...] [OPTIONS]"
RunFile = Annotated[str, Parameter(help="The run file.", allow_leading_hyphen=True)]
Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        group=Group("Settings", help_formatter=print_settings),
    ),
]


RunDir = Annotated[Path | None, Parameter(help="Folder of this run, in place of run.dir and run.name.")]
DryRun = Annotated[bool, Parameter(negative="", show_default=False, help="Print what would be run, and stop.")]


def train(file: RunFile, /, *overrides: Overrides, run_dir: RunDir = None, dry_run: DryRun = False) -> int:
    """Train as a run file says."""
    return _train(file, overrides, run_dir, dry_run)


def sft(
    file: RunFile,
    /,
    *overrides: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    run_dir: RunDir = None,
    dry_run: DryRun = False,
) -> int:
    """Supervised fine-tuning on the assistant turns of a run file's tasks.

    The same as `headrace train` with `algorithm.objective = "sft"`; `headrace train --help` lists all settings.
    """
    return _train(file, (*overrides, "--algorithm.objective=sft"), run_dir, dry_run)


def _train(file: str, overrides: tuple[str, ...], run_dir: Path | None, dry_run: bool) -> int:
    config = read_run(file, overrides, "--run-dir", "--dry-run", run_dir=run_dir)
    if dry_run:
        from headrace.cli.show import to_toml

        print(f"# run directory: {config.run.dir / config.run.name}\n\n{to_toml(config)}")
        return 0
    from headrace.trainer import UnifiedTrainer

    return 130 if UnifiedTrainer(config).fit().interrupted else 0


def read_run(file: str, overrides: tuple[str, ...], *options: str, run_dir: Path | None = None) -> RunConfig:
    """The run file with what the command line says laid over it; `options` are the command's own, for suggestions."""
    from headrace.runfile import load_config

    if file.startswith("-"):
        raise ConfigError(f"the run file comes first, got {file}; write FILE.toml {file} ...")
    for word in overrides:
        option = word.partition("=")[0]
        if option.startswith("--") and "." not in option:
            raise ConfigError(f"unknown option {option}{nearest(option, options)}; settings are --section.key value")
    return load_config(file, [*overrides, *_run_dir_overrides(run_dir)])


def _run_dir_overrides(run_dir: Path | None) -> list[str]:
    if run_dir is None:
        return []
    folder = run_dir.expanduser()
    if folder.name in ("", ".."):
        folder = folder.resolve()
    if not folder.name:
        raise ConfigError(f"--run-dir must name a folder for the run, got {run_dir}; try --run-dir runs/my-run")
    # quoted, or a folder named 7 would be read as a number
    dir_, name = (json.dumps(part, ensure_ascii=False) for part in (str(folder.parent), folder.name))
    return [f"--run.dir={dir_}", f"--run.name={name}"]
