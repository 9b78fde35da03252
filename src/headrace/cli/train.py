"""`headrace train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from headrace.cli.help import print_settings
from headrace.cli.trust import Trust, require_trust
from headrace.errors import ConfigError, HeadraceError
from headrace.registry import load_object, nearest

if TYPE_CHECKING:
    from headrace.config import RunConfig

USAGE = (
    "Usage: headrace train FILE.toml [OVERLAY.toml ...] [--section.key value ...] [OPTIONS]\n"
    "       headrace train --resume RUN_DIR [OVERLAY.toml ...] [--section.key value ...]"
)
SFT_USAGE = "Usage: headrace sft FILE.toml [OVERLAY.toml ...] [--section.key value ...] [OPTIONS]"
RunFile = Annotated[str, Parameter(help="The run file; further ones are laid over it.", allow_leading_hyphen=True)]
Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        group=Group("Settings", help_formatter=print_settings),
    ),
]


RunDir = Annotated[Path | None, Parameter(help="Folder of this run, in place of run.dir and run.name.")]
Resume = Annotated[Path | None, Parameter(help="Resume the run in this folder, with the settings of its config.json.")]
DryRun = Annotated[
    bool,
    Parameter(
        negative="",
        show_default=False,
        help="Check settings, names, backend, engine and run folder, print all settings, and stop.",
    ),
]


View = Annotated[bool, Parameter(negative="", show_default=False, help="Show the run in the browser meanwhile.")]


_OPTIONS = ("--run-dir", "--resume", "--dry-run", "--trust", "--view")


def train(
    file: RunFile | None = None,
    /,
    *overrides: Overrides,
    run_dir: RunDir = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    trust: Trust = False,
    view: View = False,
) -> int:
    """Train by a run file, or resume a run. Settings of a later file replace those of an earlier one."""
    if view and dry_run:
        raise ConfigError("--dry-run starts nothing that --view could show; leave one of them out")
    if resume is not None:
        require_trust(resume, trust)
        words = [] if file is None else [file, *overrides]
        return _run(lambda: _read_resumed(resume, words, run_dir), dry_run, view)
    if trust:
        raise ConfigError("--trust is for the folder of a run (--resume RUN_DIR); leave it out")
    if file is None:
        raise ConfigError("give a run file to train, or the folder of a run with --resume RUN_DIR")
    return _run(lambda: read_run(file, overrides, *_OPTIONS, run_dir=run_dir), dry_run, view)


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
    return _run(lambda: read_run(file, words, "--run-dir", "--dry-run", run_dir=run_dir), dry_run)


def _run(read: Callable[[], RunConfig], dry_run: bool, view: bool = False) -> int:
    if dry_run:
        return _dry_run(read)
    from headrace.trainer.trainer import UnifiedTrainer

    trainer = UnifiedTrainer(read())
    with _viewer(trainer.config) if view else nullcontext():
        return 130 if trainer.fit().interrupted else 0


@contextmanager
def _viewer(config: RunConfig) -> Iterator[None]:
    """A viewer over the folder of runs: which of them this run gets is known only once it has it."""
    viewer_beside = load_object("headrace.viewer.beside:viewer_beside")
    config.run.dir.mkdir(parents=True, exist_ok=True)
    with viewer_beside(config.run.dir) as url:
        print(f"watch it at {url}", flush=True)
        yield


def _dry_run(read: Callable[[], RunConfig]) -> int:
    """Check all that a start checks before it reads tasks and loads weights; report every problem of settings and
    names at once, then what backend and engine refuse."""
    from headrace.cli.toml_text import to_toml
    from headrace.config.loading import UnsoundConfigError
    from headrace.config.names import name_problems
    from headrace.config.rules import warn_of_long_intervals
    from headrace.run.directory import describe_start

    problems: list[str] = []
    start: list[str] = []
    try:
        config = read()
    except UnsoundConfigError as error:
        config = error.config
        problems.append(str(error))
    problems += name_problems(config)
    try:
        start = describe_start(config, _numerics(config))
    except HeadraceError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    check_parts = load_object("headrace.trainer.checks:check_parts")
    check_parts(config)  # last: it imports what the backend computes with
    warn_of_long_intervals(config)
    print("\n".join(f"# {line}" for line in start), to_toml(config), sep="\n\n")
    return 0


def _numerics(config: RunConfig) -> dict[str, str]:
    """What the bits of a deterministic run depend on, to be compared with the run that it would resume."""
    if not config.run.deterministic:
        return {}
    from headrace.trainer.setup import numerics_of

    return numerics_of(config)


def read_run(file: str, words: Sequence[str], *options: str, run_dir: Path | None = None) -> RunConfig:
    """The run files with their overrides; `options` are the command's own, for suggestions."""
    from headrace.config.loading import load_config

    refuse_unknown([file, *words], options)
    if file.startswith("-"):
        raise ConfigError(f"the run file comes first, got {file}; write FILE.toml {file} ...")
    overlays, overrides = split_words(words)
    return load_config([file, *overlays], [*overrides, *_run_dir_overrides(run_dir)], objects=())


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Run files, which are laid over the first one, apart from overrides."""
    files: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            overrides.append(word)
            overrides += [] if "=" in word else [value for value in [next(rest, None)] if value is not None]
        elif word.endswith(".toml"):
            files.append(word)
        else:
            raise ConfigError(
                f'expected an option such as --trainer.steps, or another run file (.toml) to lay over, got "{word}"'
            )
    return files, overrides


def _read_resumed(run: Path, words: Sequence[str], run_dir: Path | None) -> RunConfig:
    """The stored configuration of a run with overlays and overrides, to resume it in its own folder."""
    from headrace.config.loading import build_config, parse_overrides, read_layers
    from headrace.run.stored import stored_config

    if run_dir is not None:
        raise ConfigError(f"--resume continues in {run}, so --run-dir {run_dir} has no effect; leave it out")
    refuse_unknown(words, _OPTIONS)
    files, overrides = split_words(words)
    overlays = read_layers(files) if files else []
    given = {f"--{key}": key for key, _ in parse_overrides(overrides)}
    given |= {f"{key} of {layer.source}": key for layer in overlays for key in layer.keys}
    for shown, key in given.items():
        if key in ("run.dir", "run.name", "run.resume"):
            raise ConfigError(f"--resume continues in {run}, so {shown} has no effect; leave it out")
    stored = stored_config(run)
    if stored is None:
        raise ConfigError(f"{run} holds no run to resume (it has no config.json); give the folder of a run")
    own = [*_run_dir_overrides(run), f"--run.resume={json.dumps(str(run), ensure_ascii=False)}"]
    where = str(run / "config.json")
    return build_config(stored, [*overrides, *own], where=where, overlays=overlays, objects=(), begun=True)


def refuse_unknown(words: Sequence[str], options: Sequence[str]) -> None:
    """Raise ConfigError for an option that is neither a setting nor one of the command's own."""
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
