"""Generated problems of the reasoning-gym package. A problem is a function of family, settings and index."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # in packages that it needs
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

from headrace.data.codec import copied
from headrace.data.sources.load import plain
from headrace.data.sources.read import GENERATED, Row
from headrace.errors import ConfigError, DataError
from headrace.registry import nearest

KEY = "reasoning_gym"
"""Where in a task's metadata stands what its problem is made of again."""

BY_HASH = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Families that go through sets, so that their problems depend on the hashes of the process, which differ each time."""


def read_problems(source: str, args: dict[str, Any]) -> Iterator[Row]:
    """The problems of a family; `args` are `size`, `seed` (0 unless given) and the family's own settings."""
    family = source.removeprefix(GENERATED)
    settings = {"seed": 0, **args} if "seed" in _settings_of(family) else dict(args)
    _, entries = _generated(family, _key(settings))
    for index, entry in enumerate(entries):
        yield Row(index + 1, f"{source}, problem {index}", _row(family, settings, index, entry))


def _row(family: str, settings: dict[str, Any], index: int, entry: dict[str, Any]) -> dict[str, Any]:
    again = {"family": family, "settings": settings, "index": index}
    metadata = {KEY: again, "difficulty": plain(entry["metadata"].get("difficulty", {}))}
    return {
        "id": f"{family} {index}",
        "instruction": entry["question"],
        "answer": plain(entry["answer"]),
        "metadata": metadata,
    }


def create(family: str, settings: dict[str, Any]) -> Any:
    """The generator of a family."""
    known = _settings_of(family)
    for name in settings:
        if name not in known:
            raise ConfigError(
                f'reasoning_gym: the family "{family}" has no setting "{name}"{nearest(name, known)}; '
                f"it has {', '.join(known)}"
            )
    try:
        return reasoning_gym.create_dataset(family, **copied(settings))
    except (AssertionError, TypeError, ValueError) as error:  # how the package's own checks speak
        raise ConfigError(
            f'reasoning_gym: the family "{family}" refuses {settings}: {error or "no reason given"}'
        ) from error


def problem_of(metadata: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The generator of a task's problem, and the problem, from the task's metadata alone."""
    again = metadata[KEY]
    problems, entries = _generated(again["family"], _key(again["settings"]))
    return problems, entries[again["index"]]


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


@lru_cache(maxsize=64)
def _generated(family: str, settings: str) -> tuple[Any, list[dict[str, Any]]]:
    """The generator, and all its problems."""
    problems = create(family, json.loads(settings))
    if family in BY_HASH and os.environ.get("PYTHONHASHSEED") != "0":
        return problems, _made_elsewhere(family, settings)
    return problems, _made(problems)


def _made(problems: Any) -> list[dict[str, Any]]:
    """Made in order, from a fixed global random state: with some families a problem depends on both."""
    before = random.getstate()
    random.seed(0)
    try:
        with redirect_stdout(StringIO()):  # some print their progress
            return [problems[index] for index in range(len(problems))]
    finally:
        random.setstate(before)


def _made_elsewhere(family: str, settings: str) -> list[dict[str, Any]]:
    """Made in a process whose hashes are fixed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problems.pickle"
        command = [sys.executable, "-m", __name__, family, settings, str(path)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise DataError(f'reasoning_gym: the family "{family}" could not be generated: {last[0]}')
        return pickle.loads(path.read_bytes())


def _settings_of(family: str) -> list[str]:
    if family not in DATASETS:
        raise ConfigError(
            f'reasoning_gym has no family "{family}"{nearest(family, DATASETS)}; known: {", ".join(sorted(DATASETS))}'
        )
    return [field.name for field in fields(DATASETS[family][1]) if field.init]


if __name__ == "__main__":
    wanted, given, where = sys.argv[1:]
    Path(where).write_bytes(pickle.dumps(_made(create(wanted, json.loads(given)))))
