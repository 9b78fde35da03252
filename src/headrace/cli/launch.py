"""`headrace launch`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headrace.cli.toml_text import to_toml
from headrace.cli.train import RunFile, read_run, split_words

if TYPE_CHECKING:
    from headrace.cluster.launch.job import Job

USAGE = "Usage: headrace launch FILE.toml [OVERLAY.toml ...] --on slurm|k8s|ray [--section.key value ...] [--dry-run]"


def launch(
    file: RunFile,
    /,
    *overrides: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    on: Annotated[Literal["slurm", "k8s", "ray"], Parameter(help="The scheduler.")],
    dry_run: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print what would be submitted, and stop.")
    ] = False,
) -> None:
    """Submit a run to a scheduler: a batch script of Slurm, a RayJob of KubeRay, or a job of a Ray cluster.

    The run files are those of `headrace train`; [launch] says what the scheduler is asked for, and
    `headrace train --help launch` documents it. A job that is preempted saves, and resumes when it is started again.
    """
    config = read_run(file, overrides, "--on", "--dry-run")
    from headrace.cluster.launch.job import Job
    from headrace.config.names import check_names

    files, words = split_words(overrides)
    check_names(config)  # rather now than when the job starts
    job = Job(config, tuple(Path(one) for one in (file, *files)), tuple(words))
    print(_rendered(job, on) if dry_run else _submitted(job, on), end="" if dry_run else "\n")


def _rendered(job: Job, on: str) -> str:
    from headrace.cluster.launch.kubernetes import render_k8s
    from headrace.cluster.launch.ray_job import render_ray
    from headrace.cluster.launch.slurm import render_slurm

    if on == "slurm":
        return render_slurm(job)
    return render_k8s(job, to_toml(job.config), _stamp()) if on == "k8s" else render_ray(job, _stamp())


def _submitted(job: Job, on: str) -> str:
    from headrace.cluster.launch.kubernetes import submit_k8s
    from headrace.cluster.launch.ray_job import submit_ray
    from headrace.cluster.launch.slurm import submit_slurm

    if on == "slurm":
        return submit_slurm(job)
    return submit_k8s(job, to_toml(job.config), _stamp()) if on == "k8s" else submit_ray(job, _stamp())


def _stamp() -> str:
    """A run may be submitted again, under another name."""
    return f"{datetime.now():%m%d-%H%M%S}"
