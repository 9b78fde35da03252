"""The run directory: found, claimed and described in one place."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.config import RunConfig
from headrace.config.compatibility import check_branching, check_numerics, check_resume
from headrace.errors import ConfigError, LedgerError
from headrace.ledger import LedgerReader
from headrace.ledger.files import ledger_file
from headrace.registry import nearest
from headrace.run.checkpoint import is_checkpoint, list_checkpoints, step_of
from headrace.run.checkpoint_writer import tidy
from headrace.run.stored import CONFIG, NUMERICS, OBJECTS, TASKS, stored_config, stored_numerics, stored_texts
from headrace.tracking.jsonl import FILE_NAME, read_rows
from headrace.tracking.notices import RunLog
from headrace.utils.durable import write_durably
from headrace.utils.file_lock import FileLock, FileLockedError, holder_of

_FINISHED = "finished"
_WORDS = ("auto", "never")
_OURS = (
    CONFIG, NUMERICS, OBJECTS, TASKS, "lock", "log.txt", "ledger.sqlite", "store.sqlite", FILE_NAME, "tensorboard",
    "checkpoints", "spill",
)  # fmt: skip
"""How the names of all files begin that a run makes before its first step."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A run folder that is this process's alone."""

    folder: Path
    resumes: bool
    """Whether it holds work of this run already. If not, whatever is in it is left over from a start that failed."""
    start_from: Path | None = None
    """The checkpoint, or the run folder, that the run starts from if it has no checkpoint of its own."""
    notes: tuple[str, ...] = ()
    """What a person should read."""
    before: dict[Path, str | None] = field(default_factory=dict)
    """What claiming the folder changed, as it was; put back if the start fails."""

    def begin(self) -> None:
        """The start has not failed: what claiming the folder changed stays."""
        self.before.clear()


@contextmanager
def claim_run_dir(
    config: RunConfig, numerics: dict[str, str] | None = None, objects: dict[str, str] | None = None
) -> Iterator[Claim]:
    """Choose the run's folder, lock it, check what is in it against the configuration, and write that down.

    `run.resume` says which folder. "auto" resumes an unfinished run in DIR/NAME, and leaves a finished one alone:
    the run gets NAME-2, NAME-3 …. "never" leaves both alone. A path starts from there in a folder that holds no other
    run; but the path of this very folder resumes the run in it, even if it is finished. `numerics` is what the
    bits of a deterministic run depend on beside the configuration; it is recorded, and must stay the same; so are the
    names of `objects` that Python code gave, by what they are (the workflow, the tasks …).
    """
    source = _source(config)
    base = config.run.dir / config.run.name
    folder, lock, made = _lock_one(config, base, source)
    claim: Claim | None = None
    try:
        with _writable(folder):
            claim = _enter(config, folder, source, numerics, objects or {})
        yield claim
    except BaseException:
        if claim is not None:
            _put_back(claim.before)
        _remove_failed_start(folder, made)
        raise
    finally:
        lock.release()


def mark_finished(run_dir: Path, summary: dict[str, float]) -> None:
    """Record that the run is complete."""
    with _writable(run_dir):
        write_durably(run_dir / _FINISHED, json.dumps(summary, indent=2) + "\n")


def holds_work(folder: Path) -> bool:
    """Whether something would be lost if the folder were begun again: a checkpoint, a step, or a recorded episode."""
    if any((folder / "checkpoints").glob("step_*")) or max(read_rows(folder / FILE_NAME), default=0) > 0:
        return True
    if not ledger_file(folder).exists():
        return False
    try:
        with LedgerReader.read(folder) as ledger:
            return ledger.last_group_id() is not None
    except LedgerError:  # killed while it was made, or damaged: opening it for writing will say
        return True


# ---- which folder ----------------------------------------------------------------------------------------------------


def _source(config: RunConfig) -> Path | None:
    """The path that `run.resume` names, if it names one."""
    word = config.run.resume
    if word in _WORDS:
        return None
    path = Path(word).expanduser()
    if not word or not path.is_dir():
        raise ConfigError(
            f'run.resume must be "auto", "never" or a folder with checkpoints, got "{word}"{nearest(word, _WORDS)}'
        )
    return path


def _lock_one(config: RunConfig, base: Path, source: Path | None) -> tuple[Path, FileLock, list[Path]]:
    """The folder, its lock, and which folders were made for it, the innermost first."""
    folder, number = base, 1
    while True:
        with _writable(folder):
            if _is_free(config, folder, source):
                made = [path for path in (folder, *folder.parents) if not path.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                lock = _lock(config, folder)
                if lock is not None:
                    if _is_free(config, folder, source):  # still, now that no one else can change it
                        return folder, lock, made
                    lock.release()
        number += 1
        folder = base.with_name(f"{base.name}-{number}")


def _lock(config: RunConfig, folder: Path) -> FileLock | None:
    try:
        return FileLock(folder / "lock")
    except FileLockedError as holder:
        if config.run.resume == "never":  # someone else was faster
            return None
        raise ConfigError(_in_use(folder, str(holder))) from None


def _in_use(folder: Path, owner: str) -> str:
    return (
        f"the run folder {folder} is in use by {owner}; wait for it to end, stop it, or choose another folder "
        f"with --run-dir"
    )


def _is_free(config: RunConfig, folder: Path, source: Path | None) -> bool:
    """Whether the run may resume, or begin, in a folder."""
    if _is_own(folder, source):
        return True
    if (folder / _FINISHED).exists():
        return False
    if config.run.resume == "auto" or not ((folder / CONFIG).exists() or holds_work(folder)):
        return True
    # the same command again resumes what it began
    return source is not None and (stored_config(folder) or {}).get("run", {}).get("resume") == config.run.resume


def _is_own(folder: Path, source: Path | None) -> bool:
    return source is not None and folder.resolve() == source.resolve()


def _remove_failed_start(folder: Path, made: list[Path]) -> None:
    """Of a run that ended before it had done anything, no folder is left that was made for it.

    What was there before stays, and so does whatever this does not know: it may be the user's.
    """
    with suppress(OSError):
        if not made or holds_work(folder) or _holds_evaluation(folder):
            return
        found = list(folder.iterdir())
        if any(not entry.name.startswith(_OURS) for entry in found):
            return
        for entry in found:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for path in made:
            path.rmdir()


def _holds_evaluation(folder: Path) -> bool:
    if read_rows(folder / FILE_NAME):
        return True
    if not ledger_file(folder).exists():
        return False
    with LedgerReader.read(folder) as ledger:
        return bool(ledger.evaluations())


# ---- what is in it ---------------------------------------------------------------------------------------------------


def _put_back(before: dict[Path, str | None]) -> None:
    """A start that failed leaves the files of the run as they were."""
    for path, text in before.items():
        with suppress(OSError):
            path.unlink(missing_ok=True) if text is None else write_durably(path, text)


def _enter(
    config: RunConfig, folder: Path, source: Path | None, numerics: dict[str, str] | None, objects: dict[str, str]
) -> Claim:
    """Check before anything is written: a refused start leaves the folder as it was."""
    found = _inspect(config, folder, source, numerics, objects)
    own, stored = found.own, found.stored
    names = (_FINISHED, CONFIG, NUMERICS, OBJECTS)
    before = {folder / name: (folder / name).read_text() if (folder / name).exists() else None for name in names}
    if own:
        (folder / _FINISHED).unlink(missing_ok=True)
    tidy(folder)
    if own and stored is not None:  # config.json keeps where the run began, not how it was last resumed
        config = _with_resume(config, stored.get("run", {}).get("resume", "auto"))
        source = None if config.run.resume in _WORDS else Path(config.run.resume).expanduser()
    write_durably(folder / CONFIG, config.model_dump_json(indent=2) + "\n")
    if numerics:
        write_durably(folder / NUMERICS, json.dumps(numerics, indent=2) + "\n")
    if objects:
        write_durably(folder / OBJECTS, json.dumps(objects, indent=2) + "\n")
    return Claim(folder, found.resumes, source, found.notes, before)


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a folder holds, as far as a start in it is concerned."""

    own: bool
    """Whether `run.resume` names this very folder."""
    resumes: bool
    stored: dict[str, Any] | None
    notes: tuple[str, ...]


def _inspect(
    config: RunConfig, folder: Path, source: Path | None, numerics: dict[str, str] | None, objects: dict[str, str]
) -> _Contents:
    """What is in a folder; ConfigError if this run cannot start there."""
    own, resumes = _is_own(folder, source), holds_work(folder)
    stored = stored_config(folder) if resumes or own else None
    notes = _which(config, folder)
    if own and stored is None:
        raise ConfigError(f"{folder} holds no run to resume (it has no {CONFIG}); give the folder of a run")
    if resumes:
        unknown = f"{folder} has no {CONFIG}: whether it was begun with other settings is not known"
        saved, known = bool(list_checkpoints(folder)), stored_numerics(folder)
        notes += [unknown] if stored is None else check_resume(stored, config, folder, saved)
        check_numerics(known, numerics or {}, folder, saved)
        notes += [_unknown_numerics(folder)] if numerics and not known else []
        _check_objects(stored_texts(folder, OBJECTS), objects, folder)
    elif source is not None and not own:
        notes += _check_source(config, source)
    if own and (folder / _FINISHED).exists():
        _check_reopening(folder, stored or {}, config)
    return _Contents(own, resumes, stored, tuple(notes))


def describe_start(config: RunConfig, numerics: dict[str, str] | None = None) -> list[str]:
    """What a start would do, without doing it: which folder, and whether it resumes a run. ConfigError if it cannot."""
    source = _source(config)
    folder, number = config.run.dir / config.run.name, 1
    with _writable(folder):
        while not _is_free(config, folder, source) or (config.run.resume == "never" and holder_of(folder / "lock")):
            number += 1
            folder = folder.with_name(f"{config.run.name}-{number}")
        if owner := holder_of(folder / "lock"):
            raise ConfigError(_in_use(folder, owner))
        _require_writable(folder)
    found = _inspect(config, folder, source, numerics, {})
    checkpoints = list_checkpoints(folder)
    if found.resumes and checkpoints:
        what = f"resumes the run in it from step {step_of(checkpoints[-1])} of {config.trainer.steps}, or later if its "
        what += "ledger has more"
    elif found.resumes:
        what = "resumes the run in it, which has no checkpoint yet"
    else:
        what = "starts a new run" + (f" from {source}" if source is not None and not found.own else "")
    return [f"run directory: {folder}", what, *found.notes]


def resumed_config(config: RunConfig) -> RunConfig | None:
    """The stored configuration of the run that `run.resume` resumes in its own folder; None for any other start."""
    folder = config.run.dir / config.run.name
    if config.run.resume in _WORDS or not _is_own(folder, Path(config.run.resume).expanduser()):
        return None
    try:
        return RunConfig.model_validate(stored_config(folder))
    except ValidationError:
        return None


def _unknown_numerics(folder: Path) -> str:
    return (
        f"warning: the run in {folder} is deterministic, and has no {NUMERICS}: whether results are rounded here as "
        f"where it was begun is not known. Put the file back from a copy; or see with `headrace replay {folder}` "
        f"whether recorded steps give the same weights here"
    )


def require_same_tasks(claim: Claim, digest: str) -> None:
    """Raise ConfigError if the tasks are not those that the run was started with; `digest` is of those that it has."""
    path = claim.folder / TASKS
    known = stored_texts(claim.folder, TASKS).get("digest") if claim.resumes else None
    if known not in (None, digest):
        raise ConfigError(
            f"the tasks of the run in {claim.folder} are not those that it was started with (or in another order): "
            f"{path} has the digest {known}, and now it is {digest}. Put the tasks back, or start a new run: with "
            f'run.resume = "never"'
            + (
                f', or from its newest checkpoint with run.resume = "{claim.folder}" and another run.name'
                if list_checkpoints(claim.folder)
                else ""
            )
        )
    if known is None:
        write_durably(path, json.dumps({"digest": digest}) + "\n")


def _check_objects(stored: dict[str, str], now: dict[str, str], folder: Path) -> None:
    """Raise ConfigError if Python code gave what the configuration would now look up by name: it would be another."""
    missing = [f"{what} {name}" for what, name in stored.items() if what not in now]
    if missing:
        raise ConfigError(
            f"the run in {folder} was started from Python, which gave it {', '.join(missing)}; resume it from the same "
            f"code, with run.resume or the same run.name"
        )


def _with_resume(config: RunConfig, word: str) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": word})})


def _which(config: RunConfig, folder: Path) -> list[str]:
    name = config.run.name
    if folder.name == name:
        return []
    why = "finished" if (folder.with_name(name) / _FINISHED).exists() else "left alone"
    return [f"{name} is {why}; this run is {folder.name}"]


def _check_source(config: RunConfig, source: Path) -> list[str]:
    if not is_checkpoint(source) and not list_checkpoints(source):
        raise ConfigError(
            f"run.resume is {source}, which is neither a checkpoint nor a run folder with one; "
            f'give one of them, "auto" or "never"'
        )
    home = source.resolve().parent.parent if is_checkpoint(source) else source
    stored = stored_config(home)
    return [] if stored is None else check_branching(stored, config, source)


def _check_reopening(folder: Path, stored: dict[str, Any], config: RunConfig) -> None:
    """A finished run is resumed only if there are steps left, and a checkpoint to resume from."""
    done = stored.get("trainer", {}).get("steps", 0)
    if config.trainer.steps <= done:
        raise ConfigError(f"{folder} is finished after {done} steps; give a larger --trainer.steps to resume it")
    if not list_checkpoints(folder):
        raise ConfigError(f"{folder} is finished and has no checkpoint to resume from; start a new run")


def _require_writable(folder: Path) -> None:
    """Raise the OSError that making the folder, or writing into it, would raise."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder {folder}: {error.strerror or error}; make room or make it writable, or "
            f"choose another with --run-dir"
        ) from None


def log_to_file(run_dir: Path) -> logging.Handler:
    """Send Headrace's log to log.txt; returns the handler, to be closed at the end."""
    with _writable(run_dir):
        return RunLog(run_dir / "log.txt")
