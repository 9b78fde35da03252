"""Results that clients come back for, and the order in which the requests of a model are carried out."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headrace.errors import HeadraceError
from headrace.tinker_server.options import Refusal
from headrace.tinker_server.wire import Outcome

log = logging.getLogger("headrace")

_FARTHEST = 100_000
_OVERHEAD = 2048  # bytes of a promise beside its result
_REMEMBERED = 100_000
Work = Callable[[], Awaitable[Outcome]]


@dataclass(slots=True, eq=False)
class Promise:
    """A request under way, or its outcome."""

    id: str
    session: str
    digest: str
    work: Work
    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome | None = None
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Carry the request out; whatever goes wrong becomes its outcome."""
        try:
            outcome = await self.work()
        except asyncio.CancelledError:
            outcome = Outcome.failure("the request was cancelled", "user")
        except HeadraceError as error:
            outcome = Outcome.failure(str(error), "user")
        except Exception as error:  # a fault of the server: logged here, and reported to the client
            log.exception("request %s failed", self.id)
            outcome = Outcome.failure(f"the server failed: {type(error).__name__}: {error}", "server")
        self.work = _done  # what it held on to, the rows of a batch say, may go
        self.settle(outcome)

    def settle(self, outcome: Outcome) -> None:
        """Let those who wait have the outcome."""
        if self.outcome is None:
            self.outcome = outcome
            self.done.set()


async def _done() -> Outcome:
    raise AssertionError("a request is carried out once")


class Promises:
    """By id. Results stay for clients that ask twice, within a bound of memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._all: dict[str, Promise] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()
        self._unfetched: OrderedDict[str, int] = OrderedDict()
        self._held = 0
        self._dropped: OrderedDict[str, None] = OrderedDict()

    def find(self, request_id: str, digest: str) -> Promise | None:
        """The promise of the same request made before."""
        known = self._all.get(request_id)
        if known is None and request_id in self._dropped:
            raise Refusal(f"the request {request_id} was carried out before, and its result is no longer kept")
        if known is not None and known.digest != digest:
            raise Refusal(f"the request {request_id} was made before with another content; count seq_id on")
        return known

    def add(self, request_id: str, session: str, digest: str, work: Work) -> Promise:
        """A new promise, not yet begun."""
        promise = self._all[request_id] = Promise(request_id, session, digest, work)
        return promise

    def start(self, promise: Promise) -> asyncio.Task[None]:
        """Carry it out now, beside others."""
        promise.task = asyncio.create_task(self.run(promise))
        return promise.task

    def session_of(self, request_id: str) -> str:
        """Whose request it is; empty if nobody's."""
        promise = self._all.get(request_id)
        return "" if promise is None else promise.session

    async def run(self, promise: Promise) -> None:
        await promise.run()
        self.keep(promise)

    def keep(self, promise: Promise) -> None:
        """Count a result that has come, and drop what is too much."""
        if promise.outcome is None or promise.id not in self._all:
            return
        size = len(promise.outcome.body) + _OVERHEAD
        self._unfetched[promise.id] = size
        self._held += size
        while self._held > self._limit and len(self._fetched) + len(self._unfetched) > 1:
            ids = self._fetched or self._unfetched
            self._forget(next(iter(ids)))

    async def wait(self, request_id: str, timeout_s: float) -> Outcome | None:
        """The outcome, or None if it has not come yet."""
        promise = self._all.get(request_id)
        if promise is None:
            if request_id in self._dropped:
                raise Refusal(f"the result of {request_id} is no longer kept; raise --results-mb", status=410)
            raise Refusal(f"there is no request {request_id[:200]}; was the server restarted since?", status=404)
        try:
            async with asyncio.timeout(timeout_s):
                await promise.done.wait()
        except TimeoutError:
            return None
        if (size := self._unfetched.pop(request_id, None)) is not None:
            self._fetched[request_id] = size
        return promise.outcome

    def cancel(self, request_id: str) -> None:
        """Stop a request that was started on its own; of no effect on others."""
        promise = self._all.get(request_id)
        if promise is not None and promise.task is not None:
            promise.task.cancel()

    def drop_session(self, session: str) -> None:
        """Forget everything of a session."""
        for promise in [one for one in self._all.values() if one.session == session]:
            if promise.task is not None:
                promise.task.cancel()
            promise.settle(Outcome.failure("the session has ended", "user"))
            self._forget(promise.id)

    def _forget(self, request_id: str) -> None:
        for held in (self._fetched, self._unfetched):
            self._held -= held.pop(request_id, 0)
        self._all.pop(request_id, None)
        self._dropped[request_id] = None
        while len(self._dropped) > _REMEMBERED:
            self._dropped.popitem(last=False)


class RequestQueue:
    """Requests of one model, one after another by `seq_id`, however they arrive."""

    def __init__(self, promises: Promises, wait_s: float) -> None:
        self._promises, self._wait_s = promises, wait_s
        self._next = 1
        self._held: dict[int, Promise | None] = {}
        self._changed = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._serve())

    @property
    def next_free(self) -> int:
        """The number of a request that names none."""
        return max(self._held) + 1 if self._held else self._next

    def check(self, seq_id: int) -> None:
        """Refuse a number whose turn is over, or that is absurdly far ahead."""
        if seq_id < self._next:
            raise Refusal(f"seq_id {seq_id} is in the past; the next one of this model is {self._next}")
        if seq_id > self._next + _FARTHEST:
            raise Refusal(f"seq_id {seq_id} is too far ahead; the next one of this model is {self._next}")

    def add(self, seq_id: int, promise: Promise | None) -> None:
        """Let a request wait for its turn; None for one that was refused, whose number is used up all the same."""
        self.check(seq_id)
        self._held[seq_id] = promise
        self._changed.set()

    def close(self) -> None:
        """Fail what waits."""
        self._closed = True  # a request under way takes the cancellation for its own
        self._task.cancel()
        for promise in self._held.values():
            if promise is not None:
                promise.settle(Outcome.failure("the model was unloaded before the turn of this request", "user"))
        self._held.clear()

    async def _serve(self) -> None:
        while not self._closed:
            while self._next in self._held and not self._closed:
                promise = self._held[self._next]
                if promise is not None:
                    await self._promises.run(promise)
                self._held.pop(self._next, None)
                self._next += 1
            self._changed.clear()
            if self._closed:
                return
            try:
                async with asyncio.timeout(self._wait_s if self._held else None):
                    await self._changed.wait()
            except TimeoutError:
                self._give_up()

    def _give_up(self) -> None:
        """A number never came: carrying on without it could mean a step with half of its gradient."""
        missing, upto = self._next, max(self._held)
        sentence = f"seq_id {missing} of this model did not arrive within {self._wait_s:g} s, so this one was not run"
        for seq_id in sorted(self._held):
            promise = self._held.pop(seq_id)
            if promise is not None:
                promise.settle(Outcome.failure(sentence, "server"))
                self._promises.keep(promise)
        self._next = upto + 1
