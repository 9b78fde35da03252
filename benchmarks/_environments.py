"""Virtual environments of the systems that benchmarks compare with; each is made at its first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def environment(name: str, option: str, exact: bool = False, with_headrace: bool = False) -> Path:
    """The interpreter of `.venv-NAME`, which is made if it is not there or has other versions than its requirements.

    `exact`: install exactly the requirements, without the dependencies that the packages declare. `with_headrace`: and
    Headrace from this clone, which they also build.
    """
    requirements = HERE / f"{name}_requirements.txt"
    folder = HERE.parent / f".venv-{name}"
    python, stamp, wanted = folder / "bin" / "python", folder / ".stamp", requirements.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} into {folder.name}: some minutes ...", file=sys.stderr, flush=True)
    torch = next(line for line in wanted.splitlines() if line.startswith("torch=="))
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    all_of_it = [*install, *(["--no-deps"] if exact else []), "-r", str(requirements)]
    remedy = f"check the network, or name an environment that has {name} with {option}"
    checked([sys.executable, "-m", "venv", "--clear", str(folder)], f"cannot make {folder.name}", remedy)
    checked([*install, torch], f"cannot install {torch}", remedy)
    checked(all_of_it, f"cannot install {requirements.name}", remedy)
    if with_headrace:
        ours = [*install, "--no-deps", "--no-build-isolation", "-e", str(HERE.parent)]
        checked(ours, "cannot install Headrace", remedy)
    stamp.write_text(wanted)
    return python


def with_module(python: Path, name: str, option: str) -> Path:
    """An interpreter that the user named, if it can import the module."""
    remedy = f"name the interpreter of an environment that has {name}_requirements.txt, or leave {option} out"
    if not python.exists():
        raise SystemExit(f"there is no {python}; {remedy}")
    if subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode:
        raise SystemExit(f"{python} cannot import {name}; {remedy}")
    return python


def checked(command: list[str], problem: str, remedy: str, **variables: str) -> None:
    """Run a command that must succeed; otherwise show the end of its output."""
    done = subprocess.run(
        command, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-5:]) or "nothing"
        raise SystemExit(f"{problem}; {remedy}. It ended with {done.returncode} and said:\n{said}")


if __name__ == "__main__":
    wanted = sys.argv[1]
    print(environment(wanted, f"--{wanted}-python", wanted in ("vllm", "verl"), with_headrace=wanted == "verl"))
