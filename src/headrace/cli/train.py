"""`headrace train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from headrace.cli.help import print_settings
from headrace.cli.trust import Trust, require_trust
from headrace.errors import ConfigError
from headrace.registry import nearest

if TYPE_CHECKING:
    from headrace.config import RunConfig

USAGE = (
    "Usage: headrace train FILE.toml [--section.key value ...] [OPTIONS]\n"
    "       headrace train --resume RUN_DIR [--section.key value ...]"
)
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
Resume = Annotated[Path | None, Parameter(help="Go on with the run in this folder, as its config.json says.")]
DryRun = Annotated[bool, Parameter(negative="", show_default=False, help="Print what would be run, and stop.")]


_OPTIONS = ("--run-dir", "--resume", "--dry-run", "--trust")


def train(
    file: RunFile | None = None,
    /,
    *overrides: Overrides,
    run_dir: RunDir = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    trust: Trust = False,
) -> int:
    """Train as a run file says, or go on with a run."""
    if resume is not None:
        require_trust(resume, trust)
        return _run(_read_resumed(resume, [] if file is None else [file, *overrides], run_dir), dry_run)
    if trust:
        raise ConfigError("--trust is for the folder of a run (--resume RUN_DIR); leave it out")
    if file is None:
        raise ConfigError("what is to be trained? Give a run file, or the folder of a run with --resume RUN_DIR")
    return _run(read_run(file, overrides, *_OPTIONS, run_dir=run_dir), dry_run)


def sft(
    file: RunFile,
    /,
    *overrides: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    run_dir: RunDir = None,
    dry_run: DryRun = False,
) -> int:
    """Supervised fine-tuning on the assistant turns of a run file's tasks.

    The same as `headrace train` with `algorithm.objective = "sft"`; `headrace train --help all` lists all settings.
    """
    words = (*overrides, "--algorithm.objective=sft")
    return _run(read_run(file, words, "--run-dir", "--dry-run", run_dir=run_dir), dry_run)


def _run(config: RunConfig, dry_run: bool) -> int:
    if dry_run:
        from headrace.cli.show import to_toml
        from headrace.config.names import check_names
        from headrace.config.rules import check_declared

        check_names(config)
        check_declared(config)
        print(f"# run directory: {config.run.dir / config.run.name}\n\n{to_toml(config)}")
        return 0
    from headrace.trainer.trainer import UnifiedTrainer

    return 130 if UnifiedTrainer(config).fit().interrupted else 0


def read_run(file: str, overrides: tuple[str, ...], *options: str, run_dir: Path | None = None) -> RunConfig:
    """The run file with what the command line says laid over it; `options` are the command's own, for suggestions."""
    from headrace.config.loading import load_config

    _refuse_unknown([file, *overrides], options)
    if file.startswith("-"):
        raise ConfigError(f"the run file comes first, got {file}; write FILE.toml {file} ...")
    return load_config(file, [*overrides, *_run_dir_overrides(run_dir)], objects=())


def _read_resumed(run: Path, words: Sequence[str], run_dir: Path | None) -> RunConfig:
    """The configuration of a run, to go on in its own folder, with what the command line says laid over it."""
    from headrace.config.loading import build_config, parse_overrides
    from headrace.run.directory import stored_config

    if run_dir is not None:
        raise ConfigError(f"--resume goes on in {run}, so --run-dir {run_dir} does nothing; leave it out")
    if words and not words[0].startswith("-"):
        raise ConfigError(f"--resume takes the settings from {run / 'config.json'}; leave the run file {words[0]} out")
    _refuse_unknown(words, _OPTIONS)
    for key, _ in parse_overrides(words):
        if key in ("run.dir", "run.name", "run.resume"):
            raise ConfigError(f"--resume goes on in {run}, so --{key} does nothing; leave it out")
    stored = stored_config(run)
    if stored is None:
        raise ConfigError(f"{run} holds no run to go on with (it has no config.json); give the folder of a run")
    own = [*_run_dir_overrides(run), f"--run.resume={json.dumps(str(run), ensure_ascii=False)}"]
    return build_config(stored, [*words, *own], where=str(run / "config.json"), objects=())


def _refuse_unknown(words: Sequence[str], options: Sequence[str]) -> None:
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and "." not in option:
            raise ConfigError(f"unknown option {option}{nearest(option, options)}; settings are --section.key value")


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
