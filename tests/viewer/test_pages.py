"""The pages in a real browser, on a finished, a running and a crashed run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Looker, chromium
from made_runs import MadeRun, crashed_run, finished_run

from headrace.ledger import Ledger
from headrace.utils.file_lock import FileLock
from headrace.viewer.export import export_html
from headrace.viewer.options import ViewOptions
from headrace.viewer.run import running
from headrace.viewer.store import RunShelf


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    finished_run(root / "finished")
    crashed_run(root / "crashed")
    return root


@pytest.fixture(scope="module")
def live(runs: Path) -> Iterator[tuple[MadeRun, Ledger]]:
    """A run that this process is running."""
    made = MadeRun(runs / "live", "live")
    with made.begin(steps=50) as ledger:
        lock = FileLock(made.folder / "lock")
        made.make_step(ledger)
        made.make_step(ledger)
        ledger.flush()
        yield made, ledger
        lock.release()


@pytest.fixture(scope="module")
def url(runs: Path, live: object) -> Iterator[str]:
    with running(ViewOptions(root=runs)) as found:
        yield found


@pytest.fixture
def looker(browser: Any, url: str) -> Iterator[Looker]:
    made = Looker(browser, url)
    yield made
    made.close()


def test_the_list_shows_every_run_with_its_state(looker: Looker) -> None:
    page = looker.open()
    rows = {row.split("\n")[0].strip(): row for row in page.locator("main tbody tr").all_inner_texts()}
    assert len(rows) == 3
    said = looker.text()
    assert "done" in said and "crashed" in said and "running" in said
    assert page.locator("svg.spark").count() >= 2
    looker.check()


@pytest.mark.parametrize(
    ("run", "state", "step"), [("finished", "done", 4), ("live", "running", 2), ("crashed", "crashed", 3)]
)
def test_every_page_of_a_run_can_be_looked_at(looker: Looker, run: str, state: str, step: int) -> None:
    wanted = {
        f"#/run/{run}": state,
        f"#/run/{run}/steps": "Trained at",
        f"#/run/{run}/step/{step}": "all rewards are equal",
        f"#/run/{run}/group/0": "Rollouts, the best first",
        f"#/run/{run}/group/0/rollout/1": "CountdownJudger",
        f"#/run/{run}/timeline": "weight syncs",
        f"#/run/{run}/search": "episodes looked at",
        f"#/run/{run}/evaluations": "Set" if run == "finished" else "No evaluations",
        f"#/run/{run}/settings": "trainer.steps",
    }
    for address, text in wanted.items():
        looker.open(address)
        assert text in looker.text(), address
        looker.check()


def test_a_run_page_has_curves_the_account_and_warnings(looker: Looker) -> None:
    page = looker.open("#/run/finished")
    assert page.locator(".chart canvas").count() >= 8
    assert "68 dispatched = 48 trained + 16 filtered + 4 failed + 0 stale + 0 pending" in looker.text()
    assert "alarm.warn_drift" in looker.text()
    page.click("#all-metrics")
    page.wait_for_selector('h3:has-text("policy/grad_norm")')
    looker.check()


def test_a_crashed_run_says_that_it_was_killed_and_what_was_in_flight(looker: Looker) -> None:
    looker.open("#/run/crashed")
    assert "killed" in looker.text() and "ended without a word" in looker.text()
    looker.open("#/run/crashed/step/3")
    assert "not committed" in looker.text()
    looker.open("#/run/crashed/group/12")
    assert "in flight" in looker.text() and "Still running." in looker.text()
    looker.check()


def test_the_histogram_filters_the_groups_of_a_step(looker: Looker) -> None:
    page = looker.open("#/run/finished/step/1")
    everything = page.locator("main section tbody tr").count()
    page.click(".hist li:last-child a")
    page.wait_for_selector('.hist a[aria-current="true"]')
    assert "bin=19" in page.url
    page.wait_for_selector('section:has-text("with such a reward")')
    assert 0 < page.locator("main section tbody tr").count() <= everything
    looker.check()


def test_a_token_that_is_pointed_at_is_explained(looker: Looker) -> None:
    page = looker.open("#/run/finished/group/0/rollout/1")
    page.hover(".said.assistant .tokens .tok >> nth=1")
    facts = page.inner_text("#token-facts")
    for name in ("Token id", "sampler", "learner", "Ratio", "clipped", "Advantage", "Entropy", "Policy version", "yes"):
        assert name in facts, name
    assert page.locator(".tok.untrained").count() >= 1 and page.locator(".tok.special").count() >= 2
    page.focus(".said.assistant .tokens >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".tok.on").count() == 1
    looker.check()


def test_tokens_are_coloured_by_what_is_chosen_and_the_link_says_so(looker: Looker) -> None:
    page = looker.open("#/run/finished/group/0/rollout/1")
    before = page.get_attribute(".said.assistant .tok >> nth=0", "style")
    page.select_option("#colour", "advantage")
    assert page.get_attribute(".said.assistant .tok >> nth=0", "style") != before
    assert "colour=advantage" in page.url
    looker.open(page.url.removeprefix(looker.url))
    assert page.input_value("#colour") == "advantage"
    page.select_option("#colour", "clip")
    assert "clipped" in page.inner_text("#legend")
    looker.check()


def test_a_changed_history_is_marked(looker: Looker) -> None:
    page = looker.open("#/run/finished/group/0/rollout/3")
    assert page.locator(".turn.broken").count() == 1 and "The history was changed here" in looker.text()
    looker.open("#/run/finished/group/0/rollout/1")
    assert page.locator(".turn.broken").count() == 0


def test_filters_find_episodes_and_are_in_the_address(looker: Looker) -> None:
    page = looker.open("#/run/finished/search")
    page.fill("#search-text", "breaks")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=breaks*")
    page.wait_for_selector('[role=status]:has-text("5 found")')
    for address, found in (
        ("failed=1", 4), ("reward_min=0.5&step=2", None), ("state=restarted", 1), ("decision=filtered", 16),
        ("task=task+3&correct=0", None), ("advantage_min=0.1", None), ("kind=eval&correct=1", 11), ("version=99", 0),
    ):  # fmt: skip
        looker.open(f"#/run/finished/search?{address}")
        said = page.inner_text("[role=status].sub")
        assert "68 of 68" in said or "69 of 69" in said or "20 of 20" in said, said
        assert found is None or said.startswith(f"{found} found"), (address, said)
    looker.check()


def test_keys_go_through_rows_and_pages(looker: Looker) -> None:
    page = looker.open("#/run/finished/steps")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/step/4")
    page.wait_for_selector('h1:has-text("Step 4")')
    page.keyboard.press("[")
    page.wait_for_selector('h1:has-text("Step 3")')
    page.keyboard.press("u")
    page.wait_for_selector('th:has-text("Trained at")')
    page.keyboard.press("/")
    page.wait_for_url("**/search")
    looker.open("#/run/finished")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1 and "next / previous row" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    page.keyboard.press("t")
    page.wait_for_selector('html[data-theme="dark"]')
    looker.check()


def test_the_theme_is_the_systems_until_one_is_chosen(looker: Looker) -> None:
    page = looker.open("#/run/finished")
    for system in ("dark", "light", "dark"):
        page.emulate_media(color_scheme=system)
        page.wait_for_selector(f'html[data-theme="{system}"]')
    page.keyboard.press("t")
    page.wait_for_selector('html[data-theme="light"]')
    for system in ("light", "dark"):
        page.emulate_media(color_scheme=system)
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.evaluate("localStorage.removeItem('headrace-theme')")


def test_what_happens_in_a_run_appears_by_itself(looker: Looker, live: tuple[MadeRun, Ledger]) -> None:
    made, ledger = live
    page = looker.open("#/run/live")
    before = made.step
    made.make_step(ledger)
    ledger.flush()
    page.wait_for_selector(f'dd:has-text("{before + 1}")', timeout=10_000)
    looker.open("#/run/live/steps")
    made.make_step(ledger)
    ledger.flush()
    page.wait_for_selector(f'td a:text-is("{before + 2}")', timeout=10_000)
    looker.check()


def test_runs_are_laid_over_each_other(looker: Looker) -> None:
    page = looker.open()
    for box in page.locator("main tbody input[type=checkbox]").all():
        box.check()
    page.click("#overlay")
    page.wait_for_selector('h1:has-text("3 runs")')
    page.select_option("#metric", "policy/entropy")
    page.wait_for_url("**metric=policy*")
    page.wait_for_selector(".chart.tall canvas")
    page.select_option("#axis", "time")
    page.wait_for_url("**axis=time*")
    assert "trainer.steps" in looker.text()
    looker.check()


def test_two_evaluations_are_compared_task_by_task(looker: Looker) -> None:
    page = looker.open("#/compare?a=finished@0&b=finished@4&set=held_out")
    assert "wrong → right" in looker.text() and "+50.0 %" in looker.text()
    page.click('a:has-text("Wrong → right: 5")')
    page.wait_for_url("**flips=fixed")
    page.click("main tbody tr:first-child a >> nth=0")
    page.wait_for_url("**/evaluated/*")
    page.wait_for_selector("text=held out")
    looker.open("#/compare?a=finished@1&b=finished@2-4")
    assert "Tasks in common" in looker.text()
    looker.check()


def test_the_address_of_what_is_not_there_says_so(looker: Looker) -> None:
    for address in ("#/run/none", "#/run/finished/step/99", "#/run/finished/group/9999", "#/nonsense"):
        looker.open(address)
        assert "Not found" in looker.text() or "no such page" in looker.text()


@pytest.mark.parametrize("width", [375, 768, 1280])
def test_no_page_is_wider_than_the_screen(browser: Any, url: str, width: int) -> None:
    looker = Looker(browser, url, viewport={"width": width, "height": 800})
    for address in ("", "/step/2", "/group/0", "/group/0/rollout/1", "/search", "/timeline", "/steps"):
        address = f"#/run/finished{address}"
        page = looker.open(address)
        assert page.locator("body").bounding_box()["width"] <= width, address
        over = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
        assert over <= 0, (address, over)
    looker.check()
    looker.close()


def test_an_exported_file_opens_from_disk_without_a_server(browser: Any, runs: Path, tmp_path: Path) -> None:
    shelf = RunShelf(runs / "finished")
    made = export_html(shelf, tmp_path / "run.html", None, 20.0)
    shelf.close()
    assert made.left_out == 0 and made.pages > 60
    looker = Looker(browser, (tmp_path / "run.html").as_uri(), offline=True)
    page = looker.open("#/")
    page.click('td a:text-is("finished")')
    page.wait_for_selector(".chart canvas")
    looker.open("#/run/finished/group/0/rollout/1")
    page.hover(".said.assistant .tokens .tok >> nth=1")
    assert "Advantage" in page.inner_text("#token-facts")
    looker.open("#/run/finished/step/2")
    assert "all rewards are equal" in looker.text()
    looker.check()
    looker.close()


def test_an_export_that_is_too_large_keeps_the_newest_steps(runs: Path, tmp_path: Path) -> None:
    shelf = RunShelf(runs / "finished")
    made = export_html(shelf, tmp_path / "small.html", None, 0.02)
    shelf.close()
    assert made.left_out > 0


def test_an_episode_is_copied_as_json(looker: Looker) -> None:
    looker.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = looker.open("#/run/finished/group/0/rollout/1")
    page.click("#copy-json")
    page.wait_for_selector(".toast")
    copied = json.loads(page.evaluate("() => navigator.clipboard.readText()"))
    assert copied["group_id"] == 0 and copied["trajectories"][0]["turns"][0]["reply"]["ids"]
    looker.check()
