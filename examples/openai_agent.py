"""An agent that knows nothing of its training: OpenAI's own client, in a program of its own.

    headrace train examples/openai_agent.toml

The client takes URL and key from its environment. The task comes on stdin as JSON.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI


def main() -> None:
    """Ask, and ask once more if there is no answer in what was said. The run's judger scores the last reply."""
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
