"""Runs that are killed, again and again: a server that has torch loaded forks one process per life of a run.

`python crash.py SOCKET` serves the class `Lives`. A life is a whole training process, from claiming the run folder on.
It is killed with SIGKILL at the n-th time that something is recorded or done (`EVENTS`), or so many seconds after its
training began; or its engine is. What is left in the folder is for the caller to look at.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fork_server import ForkedChild, is_running

EVENTS = (
    "dispatched", "started", "called", "tool", "judged", "finished", "whole", "batch", "trained", "flushed", "update",
    "publication", "committed", "published", "evaluated", "tracked", "checkpoint", "sealed", "in_place", "pruned",
    "done",
)  # fmt: skip
"""Boundaries of a run, in the order in which a step comes upon them."""

WHEN = ("before", "after", "kept")
"""Before it, right after it (what was handed to the ledger is not yet written), and once the ledger has it."""

_LIMIT_S = 120.0


@dataclass(frozen=True)
class Kill:
    """When a life ends: at an event, or after seconds of training. `engine_s` are when its engine is killed."""

    event: str = ""
    nth: int = 1
    when: str = "before"
    after_s: float | None = None
    engine_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Life:
    """How a life ended."""

    killed: bool
    trained_s: float
    """From the beginning of its training to its end; 0 if it did not come so far."""
    printed: str
    events: dict[str, int] = field(default_factory=dict)
    """How often each event came, if it was not killed."""


class Lives:
    """The caller's side of a server. One life at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        self._lines = self._socket.makefile("rw")

    def live(self, scenario: str, run_dir: Path, kill: Kill | None = None) -> Life:
        """One life of the run in a folder; raises if it ended otherwise than by the end of the run, or by its kill."""
        request = {"scenario": scenario, "run_dir": str(run_dir), "kill": asdict(kill or Kill())}
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        answer = json.loads(self._lines.readline())
        code, life = answer.pop("code"), Life(**answer)
        if code:
            raise RuntimeError(f"a life of {scenario} in {run_dir} ended with {code}:\n{life.printed}")
        return life

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        self._process.wait(60)


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Fork a life per request, and engines for it; answer when it has ended."""
    import transformers.models.llama.modeling_llama  # what loading the model would import
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import crash_scenarios
    import headrace.backends.local.backend
    import headrace.tracking.tensorboard
    from headrace.engines.process import worker

    assert transformers and crash_scenarios and headrace and worker
    lines = connection.makefile("rw")
    for line in lines:
        lines.write(json.dumps(_Server(json.loads(line)).run()) + "\n")
        lines.flush()


class _Server:
    """One life, looked after from outside."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._kill = Kill(**request["kill"])
        self._deaths = sorted(self._kill.engine_s)
        self._engines: list[int] = []
        self._began_s: float | None = None
        self._report: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        output = Path(f"{self._request['run_dir']}.log")
        pid = os.fork()
        if not pid:
            ours.close()
            _live(self._request, theirs, output)
        theirs.close()
        limit_s = time.monotonic() + _LIMIT_S
        while self._attend(ours):
            if self._over(self._kill.after_s) or time.monotonic() > limit_s:
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        ended_s = time.monotonic()
        ours.close()
        for engine in self._engines:  # which end by themselves when the learner has gone
            while is_running(engine):
                time.sleep(0.005)
            os.waitpid(engine, 0)
        killed = os.WIFSIGNALED(status)
        hung = ended_s > limit_s
        return {
            "code": "a hang" if hung else 0 if killed else os.WEXITSTATUS(status),
            "killed": killed,
            "trained_s": ended_s - self._began_s if self._began_s else 0.0,
            "printed": output.read_text(errors="replace")[-6000:],
            "events": self._report,
        }

    def _over(self, after_s: float | None) -> bool:
        return after_s is not None and self._began_s is not None and time.monotonic() - self._began_s >= after_s

    def _attend(self, life: socket.socket) -> bool:
        """Do what the life asks for, for a moment; False when it has gone."""
        if self._deaths and self._engines and self._over(self._deaths[0]):
            del self._deaths[0]
            os.kill(self._engines[-1], signal.SIGKILL)
        if not select.select([life], [], [], 0.002)[0]:
            return True
        message, files, _, _ = socket.recv_fds(life, 4096, 16)
        if message.startswith(b"engine"):
            self._engines.append(_fork_engine(files))
            life.send(str(self._engines[-1]).encode())
        elif message == b"training":
            self._began_s = time.monotonic()
        elif message:
            self._report = json.loads(message)
        return bool(message)


def _fork_engine(files: list[int]) -> int:
    from headrace.engines.process import worker

    pid = os.fork()
    if not pid:
        for stream in (1, 2):
            os.dup2(files[1], stream)
        worker.main(files[0], files[2:])
        os._exit(0)
    for file in files:
        os.close(file)
    return pid


# ---- a life ----------------------------------------------------------------------------------------------------------


def _live(request: dict[str, Any], server: socket.socket, output: Path) -> None:
    """In a process of its own, which it ends."""
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(printed, stream)
    code = 1
    try:
        import crash_scenarios
        import headrace.engines.builtin as engines
        from headrace.engines.process.engine import ProcessEngine

        engines.ProcessEngine = lambda weights, options: ProcessEngine(weights, options, _launcher(server))  # type: ignore[assignment]
        watch = Watch(Kill(**request["kill"]), server)
        watch.everything()
        crash_scenarios.train(request["scenario"], Path(request["run_dir"]))
        server.send(json.dumps(watch.seen).encode())
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launcher(server: socket.socket) -> Callable[..., ForkedChild]:
    """Engine processes are forked by the server: this process has threads."""

    def launch(options: Any, files: Sequence[int]) -> ForkedChild:
        ours, theirs = socket.socketpair()
        printed, prints = os.pipe()
        socket.send_fds(server, [b"engine"], [theirs.fileno(), prints, *files])
        pid = int(server.recv(32))
        theirs.close()
        os.close(prints)
        return ForkedChild(pid, ours, printed)

    return launch


class Watch:
    """Wraps what the events are, counts them, and kills this process at the one that it is told."""

    def __init__(self, kill: Kill, server: socket.socket) -> None:
        self._kill = kill
        self._server = server
        self._ledger: Any = None
        self.seen: Counter[str] = Counter()

    def everything(self) -> None:
        """Wrap all of them."""
        from headrace.ledger import Ledger
        from headrace.run import checkpoint_writer as saving
        from headrace.tracking.base import TrackerSet
        from headrace.trainer import setup, trainer
        from headrace.trainer.learner_step import LearnerStep

        plain = {"dispatched": "dispatched", "started": "started", "called": "called", "finished": "finished",
                 "batch": "batch", "flushed": "flushed", "committed": "committed", "published": "published",
                 "evaluated": "evaluated", "prune": "pruned"}  # fmt: skip
        for method, event in plain.items():
            self._wrap(Ledger, method, lambda event=event, **_: event)
        self._wrap(Ledger, "resulted", lambda kind, **_: "tool" if kind == "tool" else "judged")
        self._wrap(Ledger, "decided", lambda state, **_: "trained" if state == "trained" else "whole")
        self._wrap(LearnerStep, "update", lambda **_: "update")
        self._wrap(TrackerSet, "log", lambda **_: "tracked")
        self._wrap(saving.CheckpointWriter, "_write", lambda **_: "checkpoint")
        self._wrap(saving.manifest, "seal", lambda **_: "sealed")
        self._wrap(saving, "put_in_place", lambda **_: "in_place")
        self._wrap(trainer, "mark_finished", lambda **_: "done")
        self._wrap(setup, "_build", lambda **_: "set up")
        opened = Ledger.open.__func__  # type: ignore[attr-defined]
        Ledger.open = classmethod(lambda cls, *args: self._opened(opened(cls, *args)))  # type: ignore[assignment]
        build = setup._build

        def began(config: Any, parts: Any, services: Any, state: Any) -> Any:
            self._wrap(type(parts.sync), "sync", lambda **_: "publication")
            self._server.send(b"training")
            return build(config, parts, services, state)

        setup._build = began

    def _opened(self, ledger: Any) -> Any:
        self._ledger = ledger
        return ledger

    def _wrap(self, owner: Any, name: str, event_of: Callable[..., str]) -> None:
        import inspect

        original = getattr(owner, name)
        signature = inspect.signature(original)

        def begin(args: Any, kwargs: Mapping[str, Any]) -> str | None:
            event = event_of(**signature.bind(*args, **kwargs).arguments)
            self.seen[event] += 1
            hit = (event, self.seen[event]) == (self._kill.event, self._kill.nth)
            if hit and self._kill.when == "before":
                _die()
            return event if hit else None

        def end(hit: str | None) -> None:
            if hit:
                if self._kill.when == "kept" and self._ledger is not None:
                    self._ledger._writer.wait(sync=False)
                _die()

        if inspect.iscoroutinefunction(original):

            async def waited(*args: Any, **kwargs: Any) -> Any:
                hit = begin(args, kwargs)
                result = await original(*args, **kwargs)
                end(hit)
                return result

            setattr(owner, name, waited)
            return

        def called(*args: Any, **kwargs: Any) -> Any:
            hit = begin(args, kwargs)
            result = original(*args, **kwargs)
            end(hit)
            return result

        setattr(owner, name, called)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
