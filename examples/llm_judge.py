"""A language model as judger. Here a stand-in replaces the model: a server with OpenAI's API that judges by a rule.

With a real model, leave this file out and write in the run file:

    judger = "llm"
    judger_args = { url = "http://localhost:8000/v1", model = "NAME", rubric = "…", api_key_env = "MY_KEY" }

headrace train examples/llm_judge.toml
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headrace.judge.countdown import evaluate, last_answer
from headrace.judge.llm import LLMJudger


class StandInJudge(LLMJudger):
    """The judger "llm", with a stand-in server on a free port."""

    def __init__(self, rubric: str) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        super().__init__(f"http://127.0.0.1:{server.server_port}/v1", "stand-in", rubric=rubric, max_tokens=32)


class StandIn(BaseHTTPRequestHandler):
    """Answers chat completions."""

    def do_POST(self) -> None:
        """Read the judge prompt and return a score."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": f"SCORE: {score(request['messages'][0]['content'])}"}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def score(prompt: str) -> int:
    """10 for an expression that gives the target, 1 for one that does not, 0 for anything else."""
    fence = re.search(r"=====\w+=====", prompt)
    assert fence is not None
    _, answer, target = prompt.split(f"\n{fence[0]}\n")[1::2]
    found = evaluate(last_answer(answer.replace("< ", "<")))  # the judger breaks up tags in what is judged
    if found is None:
        return 0
    return 10 if found[1] == int(target) else 1
