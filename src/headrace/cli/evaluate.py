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
    from headrace.afterwards import evaluate_run

    evaluate_run(config, checkpoint=checkpoint)


def export(
    run: Annotated[Path, Parameter(help="Run folder (its newest checkpoint) or a checkpoint.")],
    out: Annotated[Path, Parameter(help="Folder to write; must not exist or be empty.")],
    /,
) -> None:
    """Write a trained model as an ordinary folder in Hugging Face format; adapters are merged in."""
    from headrace.afterwards import export_run

    print(f"wrote {export_run(run, out)}")
