"""A run as a batch script of Slurm."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator

from headrace.cluster.launch.job import Job, check_job, submit
from headrace.config.derived import uses_ray
from headrace.errors import ConfigError

_RAY_PORT = 6379
_LONGEST_GRACE_S = 65_535
"""sbatch refuses more in --signal."""


def render_slurm(job: Job) -> str:
    """The script: options of sbatch, then Ray if the run needs it, then the run, which a signal stops in good order."""
    _check(job)
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in _options(job)), "set -euo pipefail", ""]
    lines += _setup(job)
    if uses_ray(job.config):
        lines += _ray(job)
    files = [path.resolve() for path in job.files]
    return "\n".join([*lines, *_run(job, shlex.join(job.command(files)))]) + "\n"


def _check(job: Job) -> None:
    check_job(job.config)
    if (grace_s := job.config.launch.grace_s) > _LONGEST_GRACE_S:
        raise ConfigError(
            f"launch.grace_s = {grace_s:g} is more than Slurm takes between the signal and the end; set it to "
            f"{_LONGEST_GRACE_S} at most"
        )


def submit_slurm(job: Job) -> str:
    """Queue the job; what sbatch said."""
    return submit(["sbatch"], render_slurm(job), "run this on a login node of the cluster")


def _options(job: Job) -> Iterator[str]:
    launch, slurm = job.config.launch, job.config.launch.slurm
    yield f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '-', job.name)}"
    yield f"--nodes={launch.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={launch.cpus}"
    yield f"--mem={math.ceil(launch.memory_gb * 1024)}M"
    if launch.gpus:
        yield f"--gpus-per-node={launch.gpus}"
    if launch.hours is not None:
        minutes = math.ceil(launch.hours * 60)
        yield f"--time={minutes // 60}:{minutes % 60:02}:00"
    for name in ("partition", "account", "qos", "constraint"):
        if value := getattr(slurm, name):
            yield f"--{name}={shlex.quote(value)}"
    # to the script alone: Ray's processes on other nodes must outlive the save
    yield f"--signal=B:TERM@{math.ceil(launch.grace_s)}"
    yield "--open-mode=append"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield from slurm.options


def _setup(job: Job) -> list[str]:
    return [*job.config.launch.slurm.setup, *([""] if job.config.launch.slurm.setup else [])]


def _ray(job: Job) -> Iterator[str]:
    """The script runs on the first node, which becomes Ray's head; all others join it."""
    launch = job.config.launch
    resources = f"--num-cpus={launch.cpus} --num-gpus={launch.gpus}"
    yield 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield 'head="${nodes[0]}"'
    yield "trap 'ray stop --force > /dev/null 2>&1 || true' EXIT"
    yield (
        f'ray start --head --node-ip-address="$head" --port={_RAY_PORT} {resources} --disable-usage-stats > /dev/null'
    )
    if launch.nodes > 1:
        yield (
            f'srun --overlap --exclude="$head" --nodes={launch.nodes - 1} --ntasks={launch.nodes - 1} '
            "--ntasks-per-node=1 \\"
        )
        yield f'  ray start --address="$head:{_RAY_PORT}" {resources} --block &'
    yield ""


def _run(job: Job, command: str) -> Iterator[str]:
    yield "# in the background: bash handles a signal only between commands, and while it waits"
    yield f"{command} &"
    yield "run=$!"
    yield "trap 'kill -TERM \"$run\" 2> /dev/null || true' TERM"
    yield "code=0"
    yield 'wait "$run" || code=$?'
    yield "# a signal ends the wait, not the run"
    yield 'while kill -0 "$run" 2> /dev/null; do code=0; wait "$run" || code=$?; done'
    if job.config.launch.slurm.requeue:
        yield "# 130: stopped by a signal, and saved; the next start resumes"
        yield 'if [ "$code" -eq 130 ]; then scontrol requeue "$SLURM_JOB_ID"; fi'
    yield 'exit "$code"'
