"""A real HTTP server in a thread, which answers as a function says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answers; `body` is sent as JSON unless it is text."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    takes_s: float = 0.0
    hangs_up: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: Any
    at_s: float


class Server:
    """Runs until it is closed; `asked` holds every request, in the order in which they came."""

    def __init__(self, answer: Callable[[Received], Answer]) -> None:
        self.asked: list[Received] = []
        self.busy = self.most_busy = 0
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = json.loads(self.rfile.read(length)) if length else None
                asked = Received(self.path, headers, body, time.monotonic())
                with lock:
                    server.asked.append(asked)
                    server.busy += 1
                    server.most_busy = max(server.busy, server.most_busy)
                    said = answer(asked)
                time.sleep(said.takes_s)
                with lock:
                    server.busy -= 1
                if said.hangs_up:
                    self.close_connection = True
                    return
                text = said.body if isinstance(said.body, str) else json.dumps(said.body)
                self.send_response(said.status)
                for name, value in said.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None: ...

        class Listener(ThreadingHTTPServer):
            request_queue_size = 256  # or who comes with many others waits a second to be let in

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Who asked has gone away: some tests do."""

        self._server = Listener(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(answer: Callable[[Received], Answer]) -> Iterator[Server]:
    """A server for the time of a test."""
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()


def completion(text: str | None, finish_reason: str = "stop", tokens: int = 3, **message: Any) -> Answer:
    """A chat completion, as OpenAI's servers give it."""
    said = {"role": "assistant", "content": text, **message}
    return Answer(
        {
            "choices": [{"index": 0, "message": said, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 7, "completion_tokens": tokens},
        }
    )
