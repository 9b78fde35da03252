"""A worker process: answers one request after the other. Run as `python -m headrace.judge.worker module:function`.

A request is a line of JSON, `[time_s, arguments]`; an answer is a line, `["ok", result]` or `["error", text]`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import resource
import signal
import sys
import threading

from headrace.judge.private import make_private

_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """On Linux at once, by a signal of the kernel. Elsewhere when the pipe closes."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit_memory(megabytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = megabytes * 1024 * 1024
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Serve until the pipe closes."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # both are for the run, which may want to finish its step
        signal.signal(number, signal.SIG_IGN)
    make_private()  # programs in the sandbox may run as the same user, and its environment is that of the run
    name, megabytes = sys.argv[1], int(sys.argv[2])
    module, _, attribute = name.partition(":")
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no answer
    function = getattr(importlib.import_module(module), attribute)
    _limit_memory(megabytes)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # the parent is gone, whatever is being worked on

    threading.Thread(target=read, daemon=True).start()
    print("ready", file=answers, flush=True)
    while True:
        time_s, arguments = json.loads(requests.get())
        # the kernel's own clock: code that never gives up the interpreter's lock ends as well
        signal.setitimer(signal.ITIMER_REAL, time_s + 1.0)
        try:
            answer = ["ok", function(*arguments)]
        except Exception as error:
            answer = ["error", f"{type(error).__name__}: {str(error)[:500]}"]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
