"""Write `constraints.txt` and `requirements/*.txt`: the exact version of every package, and the hashes of its files.

    python3.11 scripts/lock.py           # the newest versions that pyproject.toml allows, then their hashes
    .venv/bin/python scripts/lock.py --keep   # the versions of constraints.txt, and their hashes again

`constraints.txt` has the versions, for `pip install -c`. `requirements/build.txt` (pip and what builds packages) and
`requirements/all.txt` (everything else but torch) have the hashes of all files for Linux and macOS, for
`pip install --require-hashes`. Torch has no hash: the same version is another file for each kind of processor, from
another index. What it needs on a machine with CUDA it pins itself.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS, BUILD, ALL = (
    ROOT / name for name in ("constraints.txt", "requirements/build.txt", "requirements/all.txt")
)
EXTRAS = "local,gguf,plot,dev"
BUILD_TOOLS = ("editables", "packaging", "pathspec", "pip", "pluggy", "setuptools", "tomlkit", "trove-classifiers")
TOOLS = ("hatchling", *BUILD_TOOLS)
UNHASHED = ("torch",)
HEADER = {
    CONSTRAINTS: f'Exact versions of all that `pip install -e ".[{EXTRAS}]"` brings in, and of what builds it.',
    BUILD: "pip and what builds packages, with hashes; `make setup` installs it first.",
    ALL: "All other packages of constraints.txt but torch, with hashes; `make setup` installs it second.",
}
_FOREIGN = re.compile(
    r"-(pp\d+|graalpy\d+|cp3[1-9]|cp310|cp2\d)-|win32|win_|i686|armv7l|armv6l|ppc64|s390x|riscv|-ios_|android|emscripten|wasm"
)
_ABI3 = re.compile(r"-cp3\d+-abi3-")


def canonical(name: str) -> str:
    """The form of a package's name that all spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(file: Path) -> dict[str, str]:
    """Versions by canonical name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonical(name): version for name, version in found}


def resolve(torch: str) -> dict[str, str]:
    """The newest versions that pyproject.toml allows, found in a virtual environment of their own."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"

        def pip(*words: str) -> str:
            return subprocess.run([python, "-m", "pip", *words], check=True, text=True, stdout=subprocess.PIPE).stdout

        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        # torch first, or an open range of another package's picks another build
        pip("install", "--quiet", "--upgrade", "pip", f"torch=={torch}", *TOOLS)
        pip("install", "--quiet", "-e", f"{ROOT}[{EXTRAS}]")
        pip("check")
        frozen = pip("freeze", "--all", "--exclude", "headrace")
    # without local versions such as "+cpu": the plain one takes whichever build the machine's index offers
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s+]+)", frozen, re.MULTILINE)
    return {canonical(name): version for name, version in pins}


def wanted(file: str) -> bool:
    """Whether a file can be installed where Headrace runs: Python 3.11 or later, Linux or macOS."""
    return not (_FOREIGN.search(_ABI3.sub("-abi3-", file)))


def hashes(pins: dict[str, str]) -> dict[str, list[str]]:
    """SHA-256 of the files of each version, from the index that pip is configured to use."""
    from pip._internal.commands import create_command
    from pip._internal.index.collector import LinkCollector, parse_links
    from pip._internal.models.link import Link
    from pip._vendor.packaging.utils import parse_sdist_filename, parse_wheel_filename

    command = create_command("download")
    options, _ = command.parse_args([])
    collector = LinkCollector.create(command._build_session(options), options=options)  # type: ignore[attr-defined]

    def links(name: str) -> Iterable[Link]:
        sources = collector.collect_sources(name, lambda _: ())
        for source in sources.index_urls:
            page = collector.fetch_response(source.link) if source is not None and source.link is not None else None
            yield from parse_links(page) if page is not None else ()

    found: dict[str, set[str]] = defaultdict(set)
    for name, version in pins.items():
        for link in links(name):
            file = link.filename
            if not file.endswith((".whl", ".tar.gz", ".zip")) or not wanted(file):
                continue
            try:
                parts = parse_wheel_filename(file) if file.endswith(".whl") else parse_sdist_filename(file)
            except ValueError:
                continue
            if str(parts[1]) == version and link.hash_name == "sha256" and link.hash:
                found[name].add(link.hash)
        if not found[name]:
            raise SystemExit(f"the index has no file with a SHA-256 of {name}=={version}; is it configured for pip?")
    return {name: sorted(some) for name, some in found.items()}


def write(file: Path, lines: Sequence[str]) -> None:
    file.parent.mkdir(exist_ok=True)
    head = f"# {HEADER[file]}\n# Written by scripts/lock.py, which says how to refresh it; do not edit.\n"
    file.write_text(head + "".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Resolve, look up, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the versions of constraints.txt")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(line for line in project["optional-dependencies"]["local"] if line.startswith("torch"))
    pins = read_pins(CONSTRAINTS)
    if not args.keep:
        pins = resolve(re.sub(r"^torch>=([\d.]+).*", r"\1.0", torch))
    pins = dict(sorted(pins.items()))
    known = hashes({name: version for name, version in pins.items() if name not in UNHASHED})
    locked = {
        name: " \\\n".join((f"{name}=={pins[name]}", *(f"    --hash=sha256:{one}" for one in some)))
        for name, some in known.items()
    }
    write(CONSTRAINTS, [f"{name}=={version}" for name, version in pins.items()])
    write(BUILD, [line for name, line in locked.items() if name in TOOLS])
    write(ALL, [line for name, line in locked.items() if name not in TOOLS])


if __name__ == "__main__":
    main()
