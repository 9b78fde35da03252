"""Compiling the kernels at first use, into the cache, and loading them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.models.catalog import cache_dir
from headrace.utils.openmp import loaded_runtime

_HERE = Path(__file__).parent
_SOURCES = tuple(_HERE / name for name in ("kernels.c", "decoder.c", "attention.c", "narrow.c"))
_HEADERS = tuple(_HERE / name for name in ("kernels.h", "tiles.h", "small.h"))
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
_TIME_LIMIT_S = 60.0
_WRITABLE_BY_OTHERS = 0o022
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """Why there are no kernels; callers work without them."""


@dataclass(frozen=True, slots=True)
class Build:
    """Compiled kernels: those with the same digest round the same."""

    path: Path
    digest: str
    compiler: str
    """The first line of what it says of itself."""

    def __str__(self) -> str:
        return f"{self.digest[:16]} by {self.compiler}"


def load_library() -> tuple[ctypes.CDLL, Build]:
    """The kernels, compiled if the cache does not have them for this source, compiler and processor."""
    runtime = loaded_runtime()
    try:
        build = _library(_compiler(), runtime is not None)
        if runtime is not None:
            # the kernels leave OpenMP's symbols open: they must find torch's runtime and its threads, not a second one
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(build.path)), build
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from error


def _compiler() -> str:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    raise BuildError("no C compiler (cc, gcc or clang) on the PATH")


def _library(compiler: str, openmp: bool) -> Build:
    flags = [*_FLAGS, "-fopenmp" if openmp else "-fopenmp-simd"]
    version = _run(compiler, "--version")
    parts = (*(path.read_text() for path in (*_SOURCES, *_HEADERS)), compiler, version, " ".join(flags), _processor())
    key, named = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16], version.partition("\n")[0]
    folder = _private_folder(cache_dir() / "native")
    for found in sorted(folder.glob(f"kernels-{key}-*.so")):
        if _is_intact(found):
            return Build(found, _digest(found), named)
        _log.warning("the native kernels in %s are damaged, or not this user's; they are compiled again", found)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        linked = Path(scratch) / "kernels.so"
        compiled = [Path(scratch) / f"{source.stem}.o" for source in _SOURCES]
        for source, target in zip(_SOURCES, compiled, strict=True):
            _run(compiler, *flags, "-c", str(source), "-o", str(target))
        # linked without -fopenmp, or the system's OpenMP runtime would be loaded beside torch's
        _run(compiler, "-shared", *map(str, compiled), "-o", str(linked), "-lm")
        linked.chmod(0o700)
        digest = _digest(linked)
        library = folder / f"kernels-{key}-{digest}.so"
        os.replace(linked, library)  # complete or not at all, however many processes build at once
    return Build(library, digest, named)


def _private_folder(folder: Path) -> Path:
    """Made if need be. What is in it will be run, so that no one else may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        why = f"{folder} belongs to another user (id {found.st_uid})"
        _log.warning("native kernels are not used: %s; set HEADRACE_CACHE to a folder of your own", why)
        raise BuildError(why)
    if found.st_mode & _WRITABLE_BY_OTHERS:
        folder.chmod(found.st_mode & 0o777 & ~_WRITABLE_BY_OTHERS)
    return folder


def _is_intact(library: Path) -> bool:
    """Whether a file is this user's alone to write, and its content what its name says: a cut one would be a SIGBUS."""
    found = library.lstat()
    ours = found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS and library.is_file()
    return ours and not library.is_symlink() and library.stem.endswith(f"-{_digest(library)}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIME_LIMIT_S)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _processor() -> str:
    """What -march=native looks at: a cache shared by machines must not hand one the other's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
