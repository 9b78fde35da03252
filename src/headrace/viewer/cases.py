"""An episode as a pytest file that replays its workflow and judger on its record."""

from __future__ import annotations

import json
import re
from typing import Any

from headrace.errors import ConfigError
from headrace.ledger.export import plain
from headrace.viewer.store import Missing, RunView

_TEMPLATE = '''"""Group {group}, rollout {rollout} of the run {run}, replayed on its record. Written by `headrace view`.

Workflow and judger run; the model and the tools answer as they did. Run it where the run was started, so that the files
that its settings name are found: pytest {file}
"""

import json

from headrace.rollout.replayed import replay_episode

RECORD = json.loads(
    {record}
)


def test_{name}() -> None:
    episode = replay_episode(RECORD)
    assert episode.error is None
    assert str(episode.termination) == {termination}
    assert episode.reward == {reward}
    assert episode.is_correct is {correct}
'''


def case_of(view: RunView, group_id: int, rollout_idx: int, attempt: int | None) -> tuple[str, str]:
    """The name of the file, and its content."""
    with view.ledger() as reader:
        record = reader.episode_record(group_id, rollout_idx, attempt)
        if record is None or record.pruned:
            raise Missing(f"the messages of group {group_id}, rollout {rollout_idx} are not on record")
        episode = record.episode
        if episode.failed:
            raise ConfigError("the episode failed: there is no verdict that a test could compare with")
        place = (group_id, rollout_idx, episode.attempt)
        calls = [
            {"role": call.role, "messages": plain(list(call.messages)), "output": call.output.to_dict()}
            for call in reader.calls(*place)
        ]
        results = [
            {
                "number": one.number,
                "kind": one.kind,
                "name": one.name,
                "digest": one.request_digest,
                "payload": one.payload,
            }
            for one in reader.results(*place)
        ]
    content: dict[str, Any] = {
        "config": {name: view.config[name] for name in ("workflow", "judge", "rollout", "data") if name in view.config},
        "task_id": str(episode.task_id),
        "place": [group_id, rollout_idx, episode.seed],
        "attempt": episode.attempt,
        "calls": calls,
        "results": results,
    }
    name = f"group_{group_id}_rollout_{rollout_idx}"
    file = f"test_{name}.py"
    lines = [repr(line) for line in _lines(json.dumps(content))]
    return file, _TEMPLATE.format(
        group=group_id, rollout=rollout_idx, run=re.sub(r"[^\w.~-]", "_", view.id), file=file, name=name,
        record="\n    ".join(lines), termination=repr(str(episode.termination)), reward=repr(record.reward),
        correct=repr(episode.is_correct),
    )  # fmt: skip


def _lines(text: str, size: int = 100) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
