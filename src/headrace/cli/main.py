"""The command line: commands, exit codes, and errors as one line.

Exit codes: 0 done, 1 a bug (with its traceback) or `doctor` found something missing, 2 the user can mend it,
3 `import` wrote a run file in which something is left to decide, 130 interrupted by Ctrl-C or SIGTERM, 141 nobody
reads the output any more (`| head`).
"""

from __future__ import annotations

import select
import sys
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from headrace.cli.algorithms import algorithms
from headrace.cli.cluster import cluster_app
from headrace.cli.compare import compare
from headrace.cli.data import data_app
from headrace.cli.doctor import doctor
from headrace.cli.evaluate import USAGE as EVAL_USAGE
from headrace.cli.evaluate import evaluate, export
from headrace.cli.help import examples, print_section
from headrace.cli.importing import import_app
from headrace.cli.launch import USAGE as LAUNCH_USAGE
from headrace.cli.launch import launch
from headrace.cli.ledger import ledger
from headrace.cli.model import model_app
from headrace.cli.replay import replay
from headrace.cli.serve import serve_app
from headrace.cli.show import show
from headrace.cli.simulate import USAGE as SIMULATE_USAGE
from headrace.cli.simulate import simulate
from headrace.cli.train import SFT_USAGE, sft, train
from headrace.cli.train import USAGE as TRAIN_USAGE
from headrace.cli.view import view
from headrace.errors import HeadraceError
from headrace.utils.interrupts import INTERRUPTED, exit_process, take_over_signals

USER_ERROR = 2
READER_GONE = 141  # what a shell gives for a program that SIGPIPE ended


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
app.command(
    train,
    name="train",
    usage=TRAIN_USAGE,
    help_epilogue=examples(
        "headrace train examples/countdown.toml --trainer.steps 5", "headrace train --resume runs/countdown"
    ),
)
app.command(
    sft,
    name="sft",
    usage=SFT_USAGE,
    help_epilogue=examples("headrace sft examples/countdown_sft.toml --trainer.steps 5"),
)
app.command(
    evaluate,
    name="eval",
    usage=EVAL_USAGE,
    help_epilogue=examples(
        "headrace eval examples/countdown.toml --json before.json",
        "headrace eval runs/countdown --eval.sets.countdown.limit 50",
    ),
)
app.command(
    compare,
    name="compare",
    help_epilogue=examples(
        "headrace compare before.json runs/countdown", "headrace compare runs/countdown@0 runs/countdown@30"
    ),
)
app.command(export, name="export", help_epilogue=examples("headrace export runs/countdown my-model"))
app.command(
    simulate,
    name="simulate",
    usage=SIMULATE_USAGE,
    help_epilogue=examples(
        "headrace simulate examples/countdown_async.toml --simulate.group_s 20 --simulate.learn_s 8"
    ),
)
app.command(
    launch,
    name="launch",
    usage=LAUNCH_USAGE,
    help_epilogue=examples("headrace launch examples/countdown.toml --on slurm --launch.cpus 8 --dry-run"),
)
app.command(
    ledger,
    name="ledger",
    help_epilogue=examples(
        "headrace ledger runs/countdown", "headrace ledger runs/countdown --export episodes.jsonl --steps 1:5"
    ),
)
app.command(view, name="view", help_epilogue=examples("headrace view", "headrace view runs/countdown --port 0"))
app.command(
    show,
    name="show",
    help_epilogue=examples(
        "headrace show runs/countdown",
        "headrace show runs/countdown 5 17 0 --colour ratio",
        "headrace show runs/countdown 5 --json",
    ),
)
app.command(replay, name="replay", help_epilogue=examples("headrace replay runs/countdown --until 5"))
app.command(algorithms, name="algorithms", help_epilogue=examples("headrace algorithms"))
app.command(
    doctor,
    name="doctor",
    help_epilogue=examples("headrace doctor", "headrace doctor --plan examples/countdown.toml --memory 24"),
)
app.command(cluster_app)
app.command(data_app)
app.command(import_app)
app.command(model_app)
app.command(serve_app)


def main() -> None:
    """Entry point of the `headrace` script."""
    take_over_signals()
    from headrace.tracking.notices import to_console

    to_console()
    words = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        # a name that is not UTF-8, or a terminal that is not, must not fail what is printed
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    if not words or {"-h", "--help"} & {*words}:
        from headrace.tracking.terminal import Console

        app.console = Console(markup=True)
    exit_process(run(words))


def run(words: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # people have no use for a line of ours
    try:
        if list(words[:2]) == ["train", "--help"] and len(words) == 3:
            print_section(words[2])
            return 0
        result = app(list(words), exit_on_error=False, print_error=False, result_action="return_value")
    except (HeadraceError, CycloptsError) as error:
        return _failed(" ".join(str(error).split()))
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    except OSError as error:  # what the code at fault did not explain: a full disk, a folder that went away
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return READER_GONE
        return _failed(_explained(error))
    except MemoryError:
        return _failed("there is not enough memory; use a smaller model, batch or file, or end other programs")
    return result if isinstance(result, int) else 0


def _failed(why: str) -> int:
    _print_error(f"error: {why}")
    return USER_ERROR


def _print_error(text: str) -> None:
    try:
        print(text, file=sys.stderr)
    except OSError:  # nobody reads that either
        return


def _explained(error: OSError) -> str:
    what = f"{error.filename}: " if error.filename is not None else ""
    why = error.strerror or f"{type(error).__name__} {error}"
    return f"{what}{why}; look at the disk, the file's permissions or the network, and run the command again"


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads: other pipes break for other reasons."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


if __name__ == "__main__":
    main()
