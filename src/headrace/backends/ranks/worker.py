"""A rank's process: `python -m headrace.backends.ranks.worker SOCKET`.

The main thread computes. Another reads the socket, so that the process ends with its controller at once, in the middle
of a collective, too. SIGUSR1 prints the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from headrace.backends.ranks import progress
from headrace.backends.ranks.wire import Answer, Build, Call, Progress, receive, send
from headrace.errors import HeadraceError
from headrace.registry import load_object
from headrace.utils.interrupts import ignore_stop_signals


def main(number: int) -> None:
    """Serve the controller at the other end of the socket."""
    ignore_stop_signals()  # signals are for the controller, which may want to finish its step
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = socket.socket(fileno=number)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls), name="headrace-rank-calls", daemon=True).start()
    progress.listener = lambda: _send(connection, Progress())
    program: Any = None

    def build(given: Build) -> None:
        nonlocal program
        program = load_object(given.target)(*given.arguments, given.rank, given.size)

    while True:
        message = calls.get()
        _send(connection, answer(lambda m=message: build(m) if isinstance(m, Build) else run(program, m)))


def run(program: Any, call: Call) -> Any:
    """What the program's method returns."""
    return getattr(program, call.method)(*call.arguments)


def answer(function: Any) -> Answer:
    """What came of a call."""
    try:
        return Answer(function())
    except HeadraceError as error:
        return Answer(error=error)
    except Exception as error:  # whatever it is, the controller gets it
        return Answer(foreign=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _read(connection: socket.socket, calls: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            calls.put(receive(connection))
    except EOFError:
        os._exit(0)  # at once, whatever is being computed


def _send(connection: socket.socket, message: Any) -> None:
    try:
        send(connection, message)
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
