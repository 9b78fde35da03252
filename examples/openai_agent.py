"""An agent program that does not know about its training: it uses OpenAI's client.

    headrace train examples/openai_agent.toml

The client reads URL and key from its environment. The task is JSON on stdin.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI


def main() -> None:
    """Ask, and ask again if the reply has no answer. The run's judger scores the last reply."""
    messages = json.load(sys.stdin)["messages"]
    client = OpenAI()
    for _ in range(2):
        reply = client.chat.completions.create(model="any", messages=messages)
        text = reply.choices[0].message.content or ""
        if "</answer>" in text:
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And the answer?"}]


if __name__ == "__main__":
    main()
