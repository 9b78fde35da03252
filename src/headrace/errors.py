"""The exception tree, and `boundary`, which turns a foreign failure into one of ours.

Every message says the problem, the value and the remedy. `HeadraceError` is what the command line prints as one
line; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HeadraceError(Exception):
    """Something went wrong in a way that Headrace can explain."""


class ConfigError(HeadraceError, ValueError):
    """A run file, an option or a combination of options is wrong."""


class DataError(HeadraceError, ValueError):
    """Tasks, episodes or samples do not have the form they must have."""


class ModelError(HeadraceError, ValueError):
    """A model folder, name or tokenizer cannot be used."""


class MissingExtraError(HeadraceError, ImportError):
    """An optional dependency is not installed."""


_OWN_ENVIRONMENT = {"verl": "make verl (an environment of its own: .venv-verl/bin/headrace)"}
"""Extras whose versions do not fit those of the others."""


def install_line(extra: str) -> str:
    """What installs an extra, in the folder that Headrace was cloned into: it is on no index."""
    if extra in _OWN_ENVIRONMENT:
        return _OWN_ENVIRONMENT[extra]
    return f'.venv/bin/pip install -e ".[{extra}]" -c constraints.txt'


class EngineError(HeadraceError, RuntimeError):
    """The rollout engine failed or was asked for what it cannot do."""


class ServerLostError(EngineError):
    """A server that samples is gone or does not answer. Another replica, or the restarted server, may still do it."""

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class PromptTooLongError(EngineError):
    """A prompt leaves no room for a reply. It ends its episode, not the run; a workflow may catch it."""


class BackendError(HeadraceError, RuntimeError):
    """The training backend failed or was asked for what it cannot do."""


class WeightSyncError(BackendError):
    """The engine does not decode with the weights that were sent to it. `url`: the server at which they went wrong."""

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class DeviceMemoryError(BackendError):
    """The device has too little memory for what it was given."""


class CheckpointError(BackendError):
    """A checkpoint cannot be written, or is not what was written."""


class SnapshotLostError(BackendError):
    """A copy of the state that was being written is lost with the processes that held it; the run continues."""


class WorkflowError(HeadraceError, RuntimeError):
    """User code failed: a workflow or a judger, which fails the episode; or a grouping hook, which ends the run."""


class EscapeError(WorkflowError):
    """User code raised what would have ended the run: SystemExit, KeyboardInterrupt, or being cancelled by itself."""


class DeadlineError(WorkflowError, TimeoutError):
    """User code took longer than it may."""


class BudgetExceededError(WorkflowError):
    """An episode has used up its turns, tokens or tool calls. It ends there; a workflow may catch it."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """The termination reason of the episode."""


class InfrastructureError(HeadraceError, RuntimeError):
    """Something that an episode needs (a server, a sandbox) is out of order: the episode is tried again."""


class UnreachableError(InfrastructureError):
    """No connection could be made: nobody listens there."""


class RefusedError(HeadraceError, RuntimeError):
    """A server has understood the request and will not do it; asking again would not help."""

    def __init__(self, message: str, status: int, body: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class LedgerError(HeadraceError, RuntimeError):
    """The durable record of the run cannot be written or read."""


class DivergedError(HeadraceError, ArithmeticError):
    """The loss or the gradients are no longer finite."""


@contextmanager
def boundary(error: type[HeadraceError], doing: str, catch: type[Exception] = Exception) -> Iterator[None]:
    """Re-raise a failure of foreign code as `error`, saying what was being done. Our own errors pass unchanged."""
    try:
        yield
    except HeadraceError:
        raise
    except catch as cause:
        raise error(f"{doing}: {type(cause).__name__}: {cause}") from cause


_OUT_OF_ORDER = {  # package and class, by name: none of these packages is needed here
    ("httpx", "TransportError"),
    ("httpx2", "TransportError"),
    ("openai", "APIConnectionError"),
    ("openai", "InternalServerError"),
    ("anthropic", "APIConnectionError"),
    ("anthropic", "InternalServerError"),
    ("aiohttp", "ClientConnectionError"),
    ("requests", "ConnectionError"),
}


def is_infrastructure(error: BaseException) -> bool:
    """Whether something failed that has nothing to do with what was said, and may work at the next attempt."""
    if isinstance(error, (InfrastructureError, ConnectionError, TimeoutError)):
        return True
    return any((kind.__module__.partition(".")[0], kind.__name__) in _OUT_OF_ORDER for kind in type(error).__mro__)


def first_of(error: BaseException) -> BaseException:
    """The exception that ended a TaskGroup; the others of the group were cancelled because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
