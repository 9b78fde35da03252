"""Contrast, names and focus of every page, measured in a real browser, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Looker, chromium
from made_runs import finished_run

from headrace.viewer.options import ViewOptions
from headrace.viewer.run import running

PAGES = (
    "#/", "#/run/finished", "#/run/finished/steps", "#/run/finished/step/4", "#/run/finished/group/0",
    "#/run/finished/group/0/rollout/1", "#/run/finished/timeline", "#/run/finished/search",
    "#/run/finished/evaluations", "#/run/finished/settings", "#/overlay?runs=finished",
)  # fmt: skip

# The contrast of text with what is behind it, by the formula of WCAG 2; text below 4.5 (large text: 3) is returned.
LOW_CONTRAST = """() => {
  const parse = (text) => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => top.slice(0, 3).map((value, i) => value * top[3] + under[i] * (1 - top[3]));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility({ opacityProperty: true })) continue;
    if (element.closest("[disabled], [aria-hidden=true], script, style, svg")) continue;
    const style = getComputedStyle(element), under = behind(element), ink = over(parse(style.color), under);
    const [a, b] = [light(ink), light(under)].sort((x, y) => y - x), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    const contrast = (a + 0.05) / (b + 0.05), text = texts.currentNode.data.trim().slice(0, 30);
    if (contrast < (large ? 3 : 4.5))
      found.push(`${contrast.toFixed(2)} ${element.tagName} "${element.className}": ${text}`);
  }
  return [...new Set(found)];
}"""

# Elements that a screen reader could not name, and repeated ids.
NAMELESS = """() => {
  const named = (e) => e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length
    || e.title || e.textContent.trim() || e.querySelector("img[alt]:not([alt=''])");
  const wanted = "a[href], button, input, select, textarea, [role=button], [role=img], dialog, nav, canvas[role]";
  const found = [...document.querySelectorAll(wanted)].filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 120));
  for (const image of document.querySelectorAll("img:not([alt])")) found.push(image.outerHTML.slice(0, 120));
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  return [...found, ...ids.filter((id, at) => ids.indexOf(id) !== at).map((id) => `two elements have the id ${id}`)];
}"""

# What has the focus, and whether that can be seen.
FOCUSED = """() => {
  const style = getComputedStyle(document.activeElement);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  return [document.activeElement.outerHTML.slice(0, 100), ring || style.boxShadow !== "none"];
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("runs")
    finished_run(root / "finished")
    with running(ViewOptions(root=root)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(params=["light", "dark"])
def looker(request: pytest.FixtureRequest, browser: Any, url: str) -> Iterator[Looker]:
    made = Looker(browser, url, color_scheme=request.param, reduced_motion="reduce")
    yield made
    made.close()


def test_text_can_be_read_and_everything_has_a_name(looker: Looker) -> None:
    for address in PAGES:
        page = looker.open(address)
        assert page.evaluate(LOW_CONTRAST) == [], address
        assert page.evaluate(NAMELESS) == [], address
        assert page.locator("main h1").count() == 1 and page.get_attribute("html", "lang") == "en", address
    looker.check()


def test_faint_text_would_be_found(looker: Looker) -> None:
    page = looker.open("#/run/finished/steps")
    page.evaluate("document.querySelector('main h1').style.color = getComputedStyle(document.body).backgroundColor")
    page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert len(page.evaluate(LOW_CONTRAST)) == 1 and len(page.evaluate(NAMELESS)) == 1


def test_the_focus_can_be_seen_wherever_the_tab_key_leads(looker: Looker) -> None:
    page = looker.open("#/run/finished/step/4")
    for _ in range(25):
        page.keyboard.press("Tab")
        element, seen = page.evaluate(FOCUSED)
        assert seen, element
