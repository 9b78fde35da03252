"""Hugging Face datasets: by name, or from a folder that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets

from headrace.data.sources.load import plain
from headrace.data.sources.read import HUB, Row
from headrace.errors import ConfigError, DataError, boundary


def read_dataset(source: str, args: dict[str, Any]) -> Iterator[Row]:
    """The rows of one split, "train" unless the arguments say another."""
    split, rest = args.get("split", "train"), {name: value for name, value in args.items() if name != "split"}
    if source.startswith(HUB):
        found: Any = _by_name(source.removeprefix(HUB), split, rest)
    else:
        found = _from_folder(source, split, rest)
    return (Row(number, f"{source}, row {number}", plain(value)) for number, value in enumerate(found, 1))


def _by_name(name: str, split: str, args: dict[str, Any]) -> Any:
    shows_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()  # they would break the live view
    try:
        with boundary(
            DataError, f'cannot load the dataset "{name}", split "{split}"; is the name right, and can it be reached?'
        ):
            return datasets.load_dataset(name, split=split, **args)
    finally:
        if shows_bars:
            datasets.enable_progress_bars()


def _from_folder(folder: str, split: str, args: dict[str, Any]) -> Any:
    if args:
        raise ConfigError(f'the dataset in {folder} takes only the argument "split", got {", ".join(sorted(args))}')
    with boundary(DataError, f"cannot load the dataset in {folder}"):
        found = datasets.load_from_disk(folder)
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        raise DataError(f'the dataset in {folder} has no split "{split}"; set args = {{ split = … }} to one of '
                        f"{', '.join(map(str, found))}")  # fmt: skip
    return found[split]
