"""The command line: commands, exit codes, and errors as one line.

Exit codes: 0 done, 1 a bug (with its traceback) or `doctor` found something missing, 2 the user can mend it,
130 interrupted.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from headrace.cli.algorithms import algorithms
from headrace.cli.compare import compare
from headrace.cli.data import data_app
from headrace.cli.doctor import doctor
from headrace.cli.evaluate import USAGE as EVAL_USAGE
from headrace.cli.evaluate import evaluate, export
from headrace.cli.ledger import ledger
from headrace.cli.model import model_app
from headrace.cli.replay import replay
from headrace.cli.serve import serve_app
from headrace.cli.simulate import USAGE as SIMULATE_USAGE
from headrace.cli.simulate import simulate
from headrace.cli.train import SFT_USAGE, sft, train
from headrace.cli.train import USAGE as TRAIN_USAGE
from headrace.errors import HeadraceError

INTERRUPTED = 130
USER_ERROR = 2


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"headrace {version('headrace')}"
    except PackageNotFoundError:
        return "headrace (from source, not installed)"


app = App(
    name="headrace",
    help="Train language-model agents with reinforcement learning.\n\n"
    "Start with `headrace doctor`, then `headrace train examples/countdown.toml`.",
    help_format="plaintext",
    version=_version,
    suppress_keyboard_interrupt=False,  # run() decides the exit code
)
app.command(train, name="train", usage=TRAIN_USAGE)
app.command(sft, name="sft", usage=SFT_USAGE)
app.command(evaluate, name="eval", usage=EVAL_USAGE)
app.command(compare, name="compare")
app.command(export, name="export")
app.command(simulate, name="simulate", usage=SIMULATE_USAGE)
app.command(ledger, name="ledger")
app.command(replay, name="replay")
app.command(algorithms, name="algorithms")
app.command(doctor, name="doctor")
app.command(data_app)
app.command(model_app)
app.command(serve_app)


def main() -> None:
    """Entry point of the `headrace` script."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # people have no use for a line of ours
    try:
        result = app(list(words), exit_on_error=False, print_error=False, result_action="return_value")
    except (HeadraceError, CycloptsError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
