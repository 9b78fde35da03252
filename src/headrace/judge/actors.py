"""RayJudger: any judger as a pool of actors on a Ray cluster. Verdicts and failures are those of a local one."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from headrace.cluster.connection import connect
from headrace.cluster.placement import place
from headrace.config import ClusterSection
from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import ConfigError, InfrastructureError, WorkflowError
from headrace.judge.base import Judger, Verdict
from headrace.judge.compose import Holder
from headrace.utils.threads import call_sync_or_async

log = logging.getLogger("headrace")
_PAUSE_S = 0.5
_CLOSE_S = 10.0


class JudgerActor:
    """What one actor runs."""

    def __init__(self, recipe: Callable[[], Judger]) -> None:
        self._judger = recipe()

    def ready(self) -> bool:
        return True

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        return await self._judger.judge(task, episode)

    async def close(self) -> None:
        close = getattr(self._judger, "close", None)
        if callable(close):
            await call_sync_or_async(close)


class RayJudger(Holder):
    """Sends each episode to the actor with the fewest; the calls of an actor that is lost go to another one.

    `recipe` builds the judger, here (for checks) and in every actor.
    """

    def __init__(self, recipe: Callable[[], Judger], actors: int, concurrency: int, cluster: ClusterSection) -> None:
        self._judger = recipe()
        if self._judger.asks_policy:
            raise ConfigError(
                f'the judger "{self.label}" asks the model that is trained, which only this process can; set '
                f'judge.placement = "local", or give the judger a url'
            )
        sent = _packed(recipe, self.label)
        connect(cluster)
        self._cluster = cluster
        self._placed = place("judger", actors, cluster.judger, cluster)
        each = max(1, -(-concurrency // actors) * 2)  # twice its share, so that others can take over from a lost one
        actor: Any = ray.remote(JudgerActor)
        self._actors = [
            # restarted for ever by Ray, on another node of the group if its own is gone
            actor.options(**self._placed.options(index), max_restarts=-1, max_concurrency=each).remote(_Unpacked(sent))
            for index in range(actors)
        ]
        self._require_built()
        self._in_flight = [0] * actors
        self.lost = 0
        """Calls that had to be made again because their actor was lost."""

    def _require_built(self) -> None:
        """An actor that cannot build its judger would be taken for a lost one, again and again."""
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=self._cluster.patience_s)
        except RayError as error:
            self._placed.close()
            raise ConfigError(
                f'the judger "{self.label}" cannot be built in an actor: {_short(error)}; its modules and files must '
                f"be on all nodes (cluster.runtime_env has working_dir and py_modules)"
            ) from error

    @property
    def label(self) -> str:
        return self._judger.label

    def held(self) -> list[Judger]:
        return [self._judger]

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        sent = serialisable(task), serialisable(episode)
        avoided: set[int] = set()
        until = math.inf  # patience begins with the first loss: judging itself may take longer
        while True:
            index = self._next(avoided)
            try:
                return await self._ask(index, *sent)
            except RayActorError as error:
                self.lost += 1
                avoided.add(index)
                log.warning("a judger actor is lost, and task %s is judged by another: %s", task.id, _short(error))
                now = asyncio.get_running_loop().time()
                until = min(until, now + self._cluster.patience_s)
                if now > until:
                    raise InfrastructureError(f"no judger actor answered: {_short(error)}") from error
            if len(avoided) == len(self._actors):  # all are being restarted
                avoided.clear()
                await asyncio.sleep(_PAUSE_S)

    def _next(self, avoided: set[int]) -> int:
        free = [index for index in range(len(self._actors)) if index not in avoided]
        return min(free, key=self._in_flight.__getitem__)

    async def _ask(self, index: int, task: Task, episode: Episode) -> Verdict:
        self._in_flight[index] += 1
        reference = self._actors[index].judge.remote(task, episode)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)  # the time limit is over: it must not continue there
            raise
        except RayTaskError as error:
            raise _as_raised(error) from error
        except RayActorError:
            raise
        except RayError as error:  # an object that went with its node
            raise InfrastructureError(f"judging on the cluster failed: {_short(error)}") from error
        finally:
            self._in_flight[index] -= 1

    async def close(self) -> None:
        """Close the judgers of the actors, and end these."""
        if self._closed:
            return
        await super().close()
        if ray.is_initialized():
            closing = [actor.close.remote() for actor in self._actors]
            await asyncio.wait([asyncio.ensure_future(_settled(one)) for one in closing], timeout=_CLOSE_S)
        self._placed.close()


class _Unpacked:
    """A recipe that is unpacked where it is called. Its bytes travel with the call: an actor that is restarted after
    the loss of a node must not look for them there."""

    def __init__(self, recipe: bytes) -> None:
        self._recipe = recipe

    def __call__(self) -> Judger:
        return pickle.loads(self._recipe)()


async def _settled(reference: Any) -> None:
    try:
        await reference
    except RayError as error:
        log.debug("a judger was not closed: %s", error)


def _packed(recipe: Callable[[], Judger], label: str) -> bytes:
    try:
        return cloudpickle.dumps(recipe)
    except Exception as error:  # of a user's own objects, of any kind
        raise ConfigError(
            f'the judger "{label}" cannot be sent to an actor ({type(error).__name__}: {_short(error)}); set '
            f'judge.placement = "local", or give it by name, so that each actor makes its own'
        ) from error


def _as_raised(error: RayTaskError) -> Exception:
    """What the judger itself raised."""
    cause = error.cause
    if isinstance(cause, Exception) and not isinstance(cause, RayError):
        return cause
    return WorkflowError(f"the judger failed in its actor: {_short(error)}")


def _short(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)[
        :300
    ]


def serialisable(value: Any) -> Any:
    """The value, with what cannot be sent to another process left out (None in its place).

    Steps may carry what belongs to this process: images under way, references, a user's own objects.
    """
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever an object's own pickling raises
        return _reduced(value)
    return value


def _reduced(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        changed = {one.name: serialisable(getattr(value, one.name)) for one in fields(value) if one.init}
        return replace(value, **changed)
    if isinstance(value, dict):
        return {key: serialisable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [serialisable(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    log.warning("a %s cannot be sent to a judger actor, and is left out", type(value).__name__)
    return None
