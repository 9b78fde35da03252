"""Parquet files, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyarrow import parquet

from headrace.data.sources.load import plain
from headrace.data.sources.read import Row, checked_file
from headrace.errors import DataError, boundary


def read_parquet(source: str, args: dict[str, Any]) -> Iterator[Row]:
    """One row per row, numbered from 1."""
    path = checked_file(source, args)
    with boundary(DataError, f"cannot read the task file {path}"):
        file = parquet.ParquetFile(path)
    number = 0
    for batch in file.iter_batches():
        for value in batch.to_pylist():
            number += 1
            yield Row(number, f"{path}, row {number}", plain(value))
