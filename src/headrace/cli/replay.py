"""`headrace replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.trust import Trust, require_trust


def replay(
    run: Annotated[Path, Parameter(help="Run folder.")],
    /,
    *,
    until: Annotated[int | None, Parameter(help="Last step to replay; without it, all that were recorded.")] = None,
    trust: Trust = False,
) -> int:
    """Train a recorded run once more from its ledger, and compare the weights after every step.

    Nothing is generated, and the run's folder is left as it is. Exit code 1 if some weights are not the run's, to the
    bit: without `run.deterministic` the last digits depend on the number of threads, and "different" may be rounding.
    """
    from rich.table import Table
    from rich.text import Text

    from headrace.tracking.terminal import Console, working
    from headrace.trainer.replay import Replay

    require_trust(run, trust)
    console, found = Console(), Replay(run, until)
    if found.rounded_otherwise:
        console.print(
            f"rounding differs from where the run was made, so weights will differ: "
            f"{'; '.join(found.rounded_otherwise)}"
        )
    for note in found.notes:
        console.print(note, markup=False, highlight=False)
    table = Table("step", "version", "reward", "loss", "gradient", "weights", title=f"replay of {run}")
    different = 0
    with working(f"loading the model {found.config.model.name}") as doing:
        for number, step in enumerate(found, 1):
            doing(f"replayed {number} of {len(found)} batches")
            values = (step.metrics.get(key) for key in ("reward/mean", "policy/loss", "policy/grad_norm"))
            shown = ("" if value is None else f"{value:.4g}" for value in values)
            verdict = {True: "the same", False: "different", None: "not recorded"}[step.same]
            weights = Text(f"{step.digest} {verdict}", style="red" if step.same is False else "")
            table.add_row(str(step.step), str(step.version), *shown, weights)
            different += step.same is False
    console.print(table)
    if different and not found.config.run.deterministic:
        console.print(
            "the run is not deterministic (run.deterministic): weights that differ may differ by rounding only"
        )
    return int(different > 0)
