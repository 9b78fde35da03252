"""Where tasks come from: files, datasets, generators, your own functions; and how their rows become tasks."""

from headrace.data.sources.load import Loaded, load_source
from headrace.data.sources.read import Row, read_rows

__all__ = ["Loaded", "Row", "load_source", "read_rows"]
