"""A run as a job of a Ray cluster that exists already."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path

from headrace.cluster.launch.job import Job, check_job, submit
from headrace.config import LaunchSection
from headrace.config.effect import defaults
from headrace.errors import ConfigError, install_line


def render_ray(job: Job, stamp: str) -> str:
    """The `ray job submit` line."""
    return shlex.join(_words(job, stamp)) + "\n"


def submit_ray(job: Job, stamp: str) -> str:
    """Submit it, and do not wait for its end; what Ray said."""
    return submit(_words(job, stamp), None, f"install Ray ({install_line('ray')})")


def _words(job: Job, stamp: str) -> list[str]:
    _check(job)
    ray, folder = job.config.launch.ray, Path(job.config.launch.ray.working_dir)
    environment = {key: value for key, value in job.config.cluster.runtime_env.items() if key != "working_dir"}
    words = ["ray", "job", "submit", "--address", ray.address, "--submission-id", f"{job.name}-{stamp}", "--no-wait"]
    words += ["--working-dir", ray.working_dir]
    words += ["--runtime-env-json", json.dumps(environment)] if environment else []
    return [*words, "--", *job.command([_inside(path, folder) for path in job.files])]


def _check(job: Job) -> None:
    check_job(job.config)
    if not job.config.run.dir.is_absolute():
        raise ConfigError(
            f"run.dir = {json.dumps(str(job.config.run.dir))} is relative, and a Ray job runs in a folder that is "
            "deleted after it; set an absolute path that the cluster's nodes share"
        )
    usual, launch = defaults(LaunchSection), job.config.launch
    unread = [name for name in ("nodes", "cpus", "gpus", "memory_gb", "hours") if getattr(launch, name) != usual[name]]
    if unread:
        warnings.warn(
            f"launch.{', launch.'.join(unread)}: the cluster has its own nodes, so --on ray ignores it", stacklevel=2
        )


def _inside(path: Path, folder: Path) -> Path:
    """The path of a run file as the job sees it."""
    try:
        return path.resolve().relative_to(folder.resolve())
    except ValueError:
        raise ConfigError(
            f"the run file {path} is not in launch.ray.working_dir ({folder}), which is what the job gets; move it "
            "there, or set launch.ray.working_dir"
        ) from None
