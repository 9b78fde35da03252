"""Programs of tests, run as solutions are, without a sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from headrace.judge.guest import GUEST
from headrace.judge.session import Session


@contextlib.contextmanager
def talking_to(code: str) -> Iterator[Session]:
    """A session with a program of the tests."""
    (to_program, requests), (answers, from_program) = os.pipe(), os.pipe()
    with tempfile.TemporaryFile() as payload:
        payload.write(json.dumps({"code": code, "pipes": [to_program, from_program]}).encode())
        payload.seek(0)
        command = [sys.executable, "-I", "-S", "-c", GUEST, str(payload.fileno())]
        process = subprocess.Popen(command, pass_fds=(payload.fileno(), to_program, from_program))
    os.close(to_program)
    os.close(from_program)
    try:
        yield Session(requests, answers, 20.0, 1 << 18)
    finally:
        process.kill()
        process.wait()
        os.close(requests)
        os.close(answers)
