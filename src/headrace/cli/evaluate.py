"""`headrace eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.train import RunFile, read_run

USAGE = "Usage: headrace eval FILE.toml [--section.key value ...] [OPTIONS]"


def evaluate(
    file: RunFile,
    /,
    *overrides: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    checkpoint: Annotated[Path | None, Parameter(help="Checkpoint to evaluate; without it, the model itself.")] = None,
) -> None:
    """Evaluate a model or a checkpoint on a run file's sets.

    Settings of the file can be changed with `--section.key value`; `headrace train --help` lists them.
    """
    config = read_run(file, overrides, "--checkpoint")
    from headrace.evaluate import evaluate_run

    evaluate_run(config, checkpoint=checkpoint)
