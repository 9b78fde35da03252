"""Plain words: expressions that a colleague would have to guess, with what to write instead.

Settings, metric keys and names on disk keep their old words; the patterns do not match them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fakes import ROOT

AVOID = {
    r"\b(go|goes|going|gone|went)[ _]on\b": "resume, continue, proceed",
    r"\btak(e|es|ing)( it| them| a run| the run)? up\b|\btook( it| them)? up\b|\btaken up\b": "resume, restore",
    r"\bin step\b(?! ?[\d{]|\.\w)|\bin_step_": "synchronous",
    r"\bwhole groups?\b|\b(became|become|becomes|is|are|was)[ _]whole\b|\bwhole_in_order\b": "complete",
    r"\b(hand|hands|handed|handing)[ -]?out\b|\bhandout\b": "dequeue, take",
    r"\bfigures\b": "metrics, numbers, results",
    r"\b([Tt]ells?(?!\(\))|[Tt]old|[Tt]elling)\b|\buntold\b(?!_evaluation)": "log, report, warn, say",
    r"(?<!_ledger\.)\bpublications?\b": "weight sync",
    r"[Ff]ingerprints?\b": "digest",
    r"\bafterwards\b": "then, later, after",
    r"\balike\b": "the same, with a shared prefix",
    r"\bas (it comes|they come)\b": "with its defaults, unchanged",
    r"\b(be|been) had\b": "be obtained, exist",
    r"\banew\b": "again, from scratch",
    r"\bthe very\b": "the same",
    r"\bbecomes? of\b": "happens to, how it is handled",
    r"\blook(s|ed)? after\b": "monitor, manage",
    r"\b(_mourn|_?last_words|_leave_to_heir|_lends?|heirs?)\b": "a name that a colleague would guess",
}
SKIPPED = ("src/headrace/ledger", "src/headrace/viewer/timeline.py", "docs/ledger.md")
"""They name a table on disk, publications."""


def texts() -> list[Path]:
    """All that users and colleagues read, but for tests."""
    folders = ("src", "docs", "examples", "benchmarks", "scripts")
    found = [path for folder in folders for kind in ("py", "md", "toml") for path in (ROOT / folder).rglob(f"*.{kind}")]
    found += ROOT.glob("*.md")
    return sorted(path for path in found if not str(path.relative_to(ROOT)).startswith(SKIPPED))


@pytest.mark.parametrize("pattern", AVOID)
def test_plain_words(pattern: str) -> None:
    avoided = re.compile(pattern)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if avoided.search(line)
    ]
    assert not found, f"write {AVOID[pattern]} instead:\n" + "\n".join(found)
