"""One self-contained HTML file: the page with its scripts and styles, and what it shows, compressed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.errors import ConfigError, HeadraceError, LedgerError, boundary
from headrace.viewer.app import asset
from headrace.viewer.batches import group_page, step_page, steps_page
from headrace.viewer.comparison import evaluation_page
from headrace.viewer.episodes import episode_page, evaluated_page
from headrace.viewer.overview import account_page, metrics_page, run_page, runs_page
from headrace.viewer.search import Filters, facets_page, search_page
from headrace.viewer.store import Missing, RunShelf, RunView
from headrace.viewer.timeline import timeline_page

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?(?:function|class|const)\s+(\w+))", re.MULTILINE)
Page = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Exported:
    """What came into the file."""

    size: int
    pages: int
    left_out: int
    """Pages for which there was no room."""
    skipped: dict[str, str]
    """Runs whose record cannot be read, and why."""


def export_html(shelf: RunShelf, out: Path, steps: tuple[int, int] | None, limit_mb: float) -> Exported:
    """Write the file: the overview of all runs, then steps with their groups and episodes, the newest first."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f'the export is a page, got "{out.name}"; choose a name that ends with .html')
    packer = _Packer(int(limit_mb * 2**20 * 3 / 4))  # base 64 makes four bytes of three
    skipped: dict[str, str] = {}
    shown: list[RunView] = []
    for view in shelf.runs():
        try:
            pages = list(_overview(view))
        except (HeadraceError, Missing) as error:
            skipped[view.id] = str(error)
            continue
        shown.append(view)
        for page in pages:
            packer.add(*page)
    if skipped and not shown:
        raise LedgerError("; ".join(skipped.values()))
    packer.add("/api/runs", _without(runs_page(shelf), skipped))
    for view in shown:
        for page in _details(view, steps):
            if packer.full:
                packer.left_out += 1
            else:
                packer.add(*page)
    data = packer.packed()
    content = _html(base64.b64encode(data).decode())
    beside = out.with_name(f".{out.name}.partial")
    with boundary(ConfigError, f"cannot write {out}", OSError):
        try:
            beside.write_text(content, encoding="utf-8")
            beside.replace(out)  # whole or not at all
        finally:
            beside.unlink(missing_ok=True)
    return Exported(len(content), packer.pages, packer.left_out, skipped)


class _Packer:
    """{"about": …, "pages": {address: page, …}}, compressed as it grows."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._stream = zlib.compressobj(6, zlib.DEFLATED, 31)  # 31: with the header of gzip, which browsers know
        self._parts = [self._stream.compress(b'{"pages":{')]
        self._size = 0
        self.pages = self.left_out = 0

    @property
    def full(self) -> bool:
        """Whether there is no room for another page."""
        return self._size >= self._most

    def add(self, address: str, page: Any) -> None:
        """One more page."""
        text = f"{',' if self.pages else ''}{json.dumps(address)}:{json.dumps(page, separators=(',', ':'))}"
        part = self._stream.compress(text.encode()) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        self._parts.append(part)
        self._size += len(part)
        self.pages += 1

    def packed(self) -> bytes:
        """All of it."""
        note = f"{self.pages} pages" + (f"; {self.left_out} had no room" if self.left_out else "")
        about = {"at": time.strftime("%Y-%m-%d"), "note": note}
        end = self._stream.compress(f'}},"about":{json.dumps(about)}}}'.encode()) + self._stream.flush()
        return b"".join([*self._parts, end])


def _without(page: dict[str, Any], skipped: dict[str, str]) -> dict[str, Any]:
    """The list of runs, without those that the file does not hold."""
    return {**page, "runs": [row for row in page["runs"] if row["id"] not in skipped]}


# ---- what is in it ---------------------------------------------------------------------------------------------------


def _address(view: RunView, rest: str = "") -> str:
    return f"/api/runs/{_escaped(view.id)}{rest}"


def _escaped(part: str) -> str:
    """As encodeURIComponent does it."""
    return quote(part, safe="!'()*")


def _overview(view: RunView) -> Iterator[Page]:
    yield _address(view), run_page(view)
    yield _address(view, "/metrics"), metrics_page(view, [], -1, 600)
    if not view.has_ledger:
        return
    yield _address(view, "/account"), account_page(view)
    yield _address(view, "/steps"), steps_page(view, None, 500) | {"next": None}
    yield _address(view, "/facets"), facets_page(view)
    yield _address(view, "/episodes"), search_page(view, Filters(), None, 200) | {"next": None}
    yield _address(view, "/timeline"), timeline_page(view, None, None)


def _details(view: RunView, steps: tuple[int, int] | None) -> Iterator[Page]:
    """Steps, groups and episodes; a page that cannot be made (its record is damaged) is left out."""
    if not view.has_ledger:
        return
    try:
        yield from _recorded(view, steps)
    except (HeadraceError, Missing):
        return


def _recorded(view: RunView, steps: tuple[int, int] | None) -> Iterator[Page]:
    for step in _steps(view, steps):
        try:
            page = step_page(view, step)
        except (HeadraceError, Missing):
            continue
        yield _address(view, f"/steps/{step}"), page
        for group in page["groups"]:
            yield from _group(view, group["group_id"])
    yield from _evaluations(view)


def _steps(view: RunView, steps: tuple[int, int] | None) -> list[int]:
    with view.ledger() as reader:
        found = [step + 1 for (step,) in reader.rows("SELECT step FROM batches ORDER BY step DESC")]
    return [step for step in found if steps is None or steps[0] <= step <= steps[1]]


def _group(view: RunView, group_id: int) -> Iterator[Page]:
    try:
        page = group_page(view, group_id)
    except (HeadraceError, Missing):
        return
    yield _address(view, f"/groups/{group_id}"), page
    for rollout in sorted(row["rollout_idx"] for row in page["rollouts"]):
        try:
            episode = episode_page(view, group_id, rollout, None)
        except (HeadraceError, Missing):
            continue
        yield _address(view, f"/groups/{group_id}/rollouts/{rollout}"), episode


def _evaluations(view: RunView) -> Iterator[Page]:
    with view.ledger() as reader:
        found = reader.evaluations()
    for one in reversed(found):
        page = evaluation_page(view, one.step, one.name)
        yield _address(view, f"/evaluations/{one.step}/{_escaped(one.name)}"), page
        for row in page["episodes"]:
            try:
                episode = evaluated_page(view, row["id"])
            except (HeadraceError, Missing):
                continue
            yield _address(view, f"/evaluated/{row['id']}"), episode


# ---- the file --------------------------------------------------------------------------------------------------------


def _text(name: str) -> str:
    found = asset(name)
    assert found is not None, name
    return found.decode()


def bundle(entry: str = "main.js") -> str:
    """The modules as one script: a page that is opened from disk may load no modules."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        for _, other in _IMPORT.findall(_text(name)):
            visit(other)
        order.append(name)

    visit(entry)
    return "".join(_as_function(name) for name in order)


def _as_function(name: str) -> str:
    """A module in a scope of its own: it takes what it imports from, and returns what it exports."""
    text = _text(name)
    exported = ", ".join(found for _, found in _EXPORT.findall(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_variable(found[2])};\n", text))
    return f'const {_variable(name)} = (() => {{\n"use strict";\n{body}\nreturn {{ {exported} }};\n}})();\n'


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js')}"


def _html(data: str) -> str:
    scripts = [_text("theme.js"), _text("vendor/uPlot.js"), bundle()]
    styles = [_text("vendor/uPlot.css"), _text("app.css")]
    allowed = {kind: " ".join(f"'sha256-{_digest(text)}'" for text in texts) for kind, texts in
               (("script", scripts), ("style", styles))}  # fmt: skip
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    icon = "data:image/svg+xml;base64," + base64.b64encode(_text("icon.svg").encode()).decode()
    page = _text("index.html")
    head, body = page[: page.index("<link ")], page[page.index("</head>") :]
    head = head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">')  # noqa: E501  # fmt: skip
    inline = "".join(f"<style>{text}</style>\n" for text in styles)
    licence = f"<!-- uPlot: {_text_of_licence()} -->\n"
    end = "".join(f"<script>{text}</script>\n" for text in scripts)
    shown = f'<script type="application/octet-stream" id="data">{data}</script>\n'
    return f'{head}<link rel="icon" href="{icon}">\n{licence}{inline}{body}'.replace("</body>", f"{shown}{end}</body>")


def _text_of_licence() -> str:
    text = asset("vendor/uPlot.LICENSE.txt")
    return text.decode().replace("--", "-") if text else ""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
