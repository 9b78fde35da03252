"""A real browser for tests, if there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
READY_MS = 15_000


def browser_path() -> str | None:
    """The browser of the system, or what HEADRACE_BROWSER names."""
    return os.environ.get("HEADRACE_BROWSER") or next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser with a fresh profile; skips the test, and says why, where there is none."""
    path = browser_path()
    if path is None:
        pytest.skip("no Chromium here; install the package chromium, or set HEADRACE_BROWSER to a browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing; it is in the extra dev")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield made
        finally:
            made.close()


class Looker:
    """A page of the browser that notes everything that goes wrong on it, and every request that leaves the machine."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("request", self._note)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _note(self, request: Any) -> None:
        if not request.url.startswith((self.url.partition("#")[0], "data:", "blob:", "file:", "about:")):
            self.foreign.append(request.url)

    def open(self, address: str = "#/") -> Any:
        """Go there, and wait until the page is drawn."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}{address}")
        self.page.wait_for_selector("body[data-ready]", timeout=READY_MS)
        return self.page

    def text(self) -> str:
        """What can be read."""
        return self.page.inner_text("main")

    def check(self) -> None:
        """Nothing went wrong, and nothing left the machine."""
        assert self.errors == [] and self.foreign == []

    def close(self) -> None:
        self.context.close()
