"""The connection of this process to a Ray cluster: one, for all parts of a run."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import ray

from headrace.config import ClusterSection
from headrace.errors import ConfigError

_REACHABLE_S = 10.0
_SIGACTION_BYTES = 512  # more than a sigaction has on any system
NAMESPACE = "headrace"
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable of a process that runs as a job of Ray: what the job was submitted with."""


def connect(cluster: ClusterSection, remedy: str = 'set cluster.address = "local"') -> None:
    """Join the cluster, or start one on this machine. Does nothing if this process is connected already.

    `remedy` is what else there is to do where no cluster is found.
    """
    if ray.is_initialized():
        return
    if not cluster.address:
        raise ConfigError('cluster.address is empty, so there is no cluster; set it to "auto", "local" or an address')
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without GPUs keep the variables as set
    with _signals_as_they_are(), _quiet():
        try:
            _require_reachable(cluster.address)
            _on_lasting_thread(
                lambda: ray.init(
                    address=cluster.address,
                    namespace=NAMESPACE,
                    runtime_env=_own_environment(cluster.runtime_env) or None,
                    include_dashboard=False if cluster.address == "local" else None,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            )
        except Exception as error:  # boundary: of a node that does not start in time Ray raises no narrower one
            if cluster.address == "local":
                raise ConfigError(
                    f"Ray does not start on this machine ({_first_line(error)}); if other programs take all of it, try "
                    f'again, or start Ray with `ray start --head` and set cluster.address = "auto"'
                ) from error
            raise ConfigError(
                f'there is no Ray cluster at cluster.address = "{cluster.address}" ({_first_line(error)}); start one '
                f"with `ray start --head`, or {remedy}"
            ) from error


def _own_environment(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Of a runtime environment, what this process does not have yet. `headrace launch` gives it to a job of Ray, and
    Ray refuses what is given to the job and to its driver."""
    of_job: Mapping[str, Any] = json.loads(os.environ.get(_JOB, "{}")).get("runtime_env") or {}
    own = {key: value for key, value in wanted.items() if key not in of_job}
    known = of_job.get("env_vars") or {}
    new = {name: value for name, value in wanted.get("env_vars", {}).items() if name not in known}
    return own | {"env_vars": new} if new else own


def _on_lasting_thread(function: Callable[[], object]) -> None:
    """Call it on a thread that stays: Ray's processes are killed with the thread that has started them, which may be
    that of a learner, and this process may have another run after it."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            done.set_exception(error)
            return
        done.set_result(None)
        threading.Event().wait()

    threading.Thread(target=run, name="headrace-ray", daemon=True).start()
    done.result()


def _require_reachable(address: str) -> None:
    """OSError if nobody listens there: Ray itself would try again for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=_REACHABLE_S).close()


@contextmanager
def _signals_as_they_are() -> Iterator[None]:
    """Ray handles SIGTERM in place of us, who save the run: in Python if this is the main thread, and in C in any.

    The handler in C prints a stack, calls the one that was there, and ends the process three seconds later.
    """
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None)
    is_main = threading.current_thread() is threading.main_thread()
    in_python, in_c = signal.getsignal(signal.SIGTERM), ctypes.create_string_buffer(_SIGACTION_BYTES)
    if sigaction is not None:
        sigaction(signal.SIGTERM, None, in_c)
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, in_python)
        if sigaction is not None:
            sigaction(signal.SIGTERM, in_c, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """It warns that it leaves our signal handler alone where this is not the main thread."""
    worker = logging.getLogger("ray._private.worker")
    level = worker.level
    worker.setLevel(logging.ERROR)
    try:
        yield
    finally:
        worker.setLevel(level)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
