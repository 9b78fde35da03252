"""`headrace compare`."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.errors import ConfigError, boundary

_PLACE = "File of headrace eval --json, run folder (its newest evaluation), or RUN_DIR@STEP."


def compare(
    first: Annotated[str, Parameter(help=_PLACE)],
    second: Annotated[str, Parameter(help=_PLACE)],
    /,
    *,
    common: Annotated[
        bool, Parameter(negative="", show_default=False, help="Compare what both have, though the task lists differ.")
    ] = False,
    json: Annotated[Path | None, Parameter(help="Write the results as JSON.")] = None,
) -> None:
    """Compare two evaluations of the same tasks, task by task.

    Shows the difference of pass@1 (second minus first) with a 95% interval from
    a paired bootstrap over tasks; on how many tasks the second is better, worse
    and the same; and the exact sign test of that.
    """
    from headrace.evaluation.compare import compare as compare_results
    from headrace.evaluation.report import comparison_table, show
    from headrace.evaluation.results_file import read_evaluation

    one, other = read_evaluation(first), read_evaluation(second)
    found = compare_results(one, other, common)
    if json is not None:
        rows = [difference.to_dict() for difference in found]
        with boundary(ConfigError, f"cannot write {json}", OSError):
            json.write_text(
                json_text.dumps({"first": one.of, "second": other.of, "differences": rows}, indent=1) + "\n"
            )
    show(comparison_table(found, f"{other.of} against {one.of}"))
