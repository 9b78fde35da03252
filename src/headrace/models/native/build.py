"""Compiling the kernels at first use, into the cache, and loading them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from headrace.models.catalog import cache_dir

_HERE = Path(__file__).parent
_SOURCES = tuple(_HERE / name for name in ("kernels.c", "decoder.c", "attention.c", "narrow.c"))
_HEADERS = tuple(_HERE / name for name in ("kernels.h", "tiles.h", "small.h"))
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
_TIME_LIMIT_S = 60.0


class BuildError(Exception):
    """Why there are no kernels; callers go on without them."""


def load_library() -> ctypes.CDLL:
    """The kernels, compiled if the cache does not have them for this source, compiler and processor."""
    runtime = openmp_runtime()
    try:
        path = _library(_compiler(), runtime is not None)
        if runtime is not None:
            # the kernels leave OpenMP's symbols open: they must find torch's runtime and its threads, not a second one
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from error


def openmp_runtime() -> Path | None:
    """The GNU OpenMP library that torch has loaded into this process; None where torch uses none or another."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = {Path(line.split(maxsplit=5)[5]) for line in lines if "/libgomp" in line}
    packages = Path(torch.__file__).parent.parent
    of_torch = {path for path in loaded if path.is_relative_to(packages / "torch") or "torch.libs" in path.parts}
    chosen = of_torch or loaded
    return chosen.pop() if len(chosen) == 1 else None


def _compiler() -> str:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    raise BuildError("no C compiler (cc, gcc or clang) on the PATH")


def _library(compiler: str, openmp: bool) -> Path:
    flags = [*_FLAGS, "-fopenmp" if openmp else "-fopenmp-simd"]
    version = _run(compiler, "--version")
    parts = (*(path.read_text() for path in (*_SOURCES, *_HEADERS)), compiler, version, " ".join(flags), _processor())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_dir() / "native" / f"kernels-{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
        linked = Path(scratch) / "kernels.so"
        compiled = [Path(scratch) / f"{source.stem}.o" for source in _SOURCES]
        for source, target in zip(_SOURCES, compiled, strict=True):
            _run(compiler, *flags, "-c", str(source), "-o", str(target))
        # linked without -fopenmp, or the system's OpenMP runtime would be loaded beside torch's
        _run(compiler, "-shared", *map(str, compiled), "-o", str(linked), "-lm")
        os.replace(linked, library)  # whole or not at all, however many processes build at once
    return library


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
