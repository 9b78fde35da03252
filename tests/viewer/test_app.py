"""The viewer without a browser: who may ask, what is answered, and that nothing on disk changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from made_runs import MadeRun, crashed_run, finished_run

from headrace.cli.main import run
from headrace.errors import ConfigError, LedgerError
from headrace.ledger import schema
from headrace.utils.file_lock import FileLock
from headrace.viewer.export import export_html
from headrace.viewer.folders import changed_at, state_of
from headrace.viewer.metrics import MetricsTable
from headrace.viewer.options import ViewOptions
from headrace.viewer.run import running
from headrace.viewer.search import Filters
from headrace.viewer.store import RunShelf


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    finished_run(folder / "finished")
    crashed_run(folder / "inner" / "crashed")
    return folder


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with running(ViewOptions(root=root)) as found:
        yield found.rstrip("/")


def get(url: str, **options: Any) -> httpx2.Response:
    return httpx2.get(url, **options)


PAGES = [
    "", "/metrics", "/metrics?keys=reward/mean&points=2&after=1", "/account", "/steps", "/steps?before=3&limit=1",
    "/steps/2", "/groups/1", "/groups/1/rollouts/2", "/evaluations/4/held_out", "/evaluated/3", "/timeline", "/facets",
    "/episodes", "/episodes?text=answer&reward_min=0.5", "/groups/16/rollouts/0?attempt=0",
]  # fmt: skip


HUGE = "9" * 23  # more than SQLite can hold


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_json_and_forbids_everything_that_is_not_ours(url: str, page: str) -> None:
    answer = get(f"{url}/api/runs/finished{page}")
    assert answer.status_code == 200, answer.text
    assert isinstance(answer.json(), dict)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("page", "status", "said"),
    [
        ("/api/runs/none", 404, 'no run "none"'),
        ("/api/runs/..%2F..%2Fetc", 404, "no"),
        ("/api/runs/finished/steps/99", 404, "step 99"),
        ("/api/runs/finished/groups/1/rollouts/77", 404, "rollout 77"),
        ("/api/runs/finished/groups/1/rollouts/1?attempt=5", 404, "attempt 5"),
        ("/api/runs/finished/episodes?reward_min=much", 400, '"reward_min" must be a number'),
        ("/api/runs/finished/episodes?kind=all", 400, "train or eval"),
        ("/api/runs/finished/timeline?start=now", 400, "seconds"),
        ("/api/compare?a=finished&b=finished@4", 400, "RUN@STEP"),
        ("/api/compare?a=finished@3&b=finished@4&set=held_out", 400, "no evaluation"),
        (f"/api/compare?a=finished@{HUGE}&b=finished@4", 400, "RUN@STEP"),
        (f"/api/runs/finished/steps/{HUGE}", 404, "has no GET"),
        (f"/api/runs/finished/steps/{HUGE * 1000}", 404, "has no GET"),
        (f"/api/runs/finished/evaluated/{HUGE}", 404, "has no GET"),
        (f"/api/runs/finished/steps?before={HUGE}", 400, "at most"),
        (f"/api/runs/finished/episodes?step={HUGE}", 400, '"step" must be a number'),
        ("/api/runs/finished/timeline?start=nan&end=inf", 400, "seconds"),
        ("/api/runs/finished/metrics?keys=reward/maen", 400, 'did you mean "reward/mean"?'),
        ("/assets/../app.py", 404, "no"),
        ("/assets/%2e%2e/app.py", 404, "no"),
        ("/nothing", 404, "has no GET"),
    ],
)
def test_what_cannot_be_answered_is_explained(url: str, page: str, status: int, said: str) -> None:
    answer = get(f"{url}{page}")
    assert answer.status_code == status and said in answer.json()["error"]


def test_pages_of_other_sites_and_other_names_are_refused(url: str) -> None:
    assert get(f"{url}/api/runs", headers={"Host": "evil.example"}).status_code == 403
    assert get(f"{url}/api/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    assert httpx2.post(f"{url}/api/runs").status_code == 405


def test_beyond_loopback_a_token_is_needed_and_the_page_itself_holds_nothing(root: Path) -> None:
    with pytest.raises(ConfigError, match="token"):
        ViewOptions(root=root, host="0.0.0.0")
    with running(ViewOptions(root=root, token="s3cret")) as found:
        url, _, fragment = found.partition("#")
        assert fragment == "token=s3cret"
        assert get(url).status_code == 200 and get(f"{url}assets/app.css").status_code == 200
        for page in ("api/runs", "api/runs/finished", "api/runs/finished/events", "assets"):
            assert get(f"{url}{page}").status_code == 401, page
        assert get(f"{url}api/runs", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert get(f"{url}api/runs", headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_nothing_on_disk_is_changed(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    before = digests(tmp_path)
    with running(ViewOptions(root=tmp_path)) as url:
        for page in PAGES:
            get(f"{url}api/runs/run{page}")
    assert digests(tmp_path) == before


def digests(folder: Path) -> dict[str, str]:
    """Of every file but those that SQLite makes for readers."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal")))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_looking_at_a_run_does_not_count_as_its_last_change(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    before = changed_at(tmp_path / "run")
    with running(ViewOptions(root=tmp_path)) as url:
        get(f"{url}api/runs/run/steps/1")
    log = tmp_path / "run" / "ledger.sqlite-wal"
    log.touch()  # as SQLite leaves it
    assert changed_at(tmp_path / "run") == before
    log.write_bytes(b"recorded")
    os.utime(log, (before or 0, (before or 0) + 60))
    assert changed_at(tmp_path / "run") == (before or 0) + 60


@pytest.mark.parametrize("name", ["log.txt", "lock", "metrics.jsonl", "config.json", "ledger.sqlite-wal"])
def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    finished_run(tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with running(ViewOptions(root=tmp_path)) as url:
        for page in ("api/runs", "api/runs/run", "api/runs/run/metrics"):
            assert get(f"{url}{page}", timeout=10).status_code == 200


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_there_is_not_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port must be between .* got {port}"):
        ViewOptions(root=tmp_path, port=port)


@pytest.mark.parametrize("steps", ["5:1", "0:3", "x"])
def test_steps_to_export_go_up_from_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str) -> None:
    assert run(["view", str(tmp_path), "--export", str(tmp_path / "all.html"), "--steps", steps]) == 2
    assert "--steps is A:B" in capsys.readouterr().err and not (tmp_path / "all.html").exists()


def test_a_damaged_ledger_is_named_by_its_own_path_and_left_out_of_an_export(tmp_path: Path) -> None:
    finished_run(tmp_path / "whole")
    finished_run(tmp_path / "torn")
    ledger = tmp_path / "torn" / "ledger.sqlite"
    ledger.write_bytes(ledger.read_bytes()[:50] + b"x" * 5000)
    ledger.with_name("ledger.sqlite-wal").write_bytes(b"x" * 100)
    with running(ViewOptions(root=tmp_path)) as url:
        answer = get(f"{url}api/runs/torn/steps")
    assert answer.status_code == 422 and str(ledger) in answer.json()["error"]
    shelf = RunShelf(tmp_path)
    made = export_html(shelf, tmp_path / "all.html", None, 20)
    assert list(made.skipped) == ["torn"] and str(ledger) in made.skipped["torn"] and made.pages > 10
    shelf.close()
    alone = RunShelf(tmp_path / "torn")
    with pytest.raises(LedgerError, match="torn"):
        export_html(alone, tmp_path / "torn.html", None, 20)
    alone.close()


def test_an_older_ledger_is_shown_and_not_migrated(tmp_path: Path) -> None:
    finished_run(tmp_path / "old")
    with closing(sqlite3.connect(tmp_path / "old" / "ledger.sqlite", isolation_level=None)) as older:
        older.execute("DROP TABLE batch_tokens")
        for index in ("groups_by_step", "groups_by_task"):
            older.execute(f"DROP INDEX {index}")
        for column in ("started_at", "finished_at"):
            older.execute(f"ALTER TABLE episodes DROP COLUMN {column}")
        older.execute("PRAGMA user_version = 4")
    with running(ViewOptions(root=tmp_path)) as url:
        episode = get(f"{url}api/runs/old/groups/0/rollouts/1").json()
        columns = episode["trajectories"][0]["turns"][0]["reply"]["columns"]
        assert "advantage" not in columns or columns["advantage"]
        assert "logprob" in columns and "entropy" not in columns
        assert get(f"{url}api/runs/old/timeline").json()["known"] is False
    with closing(sqlite3.connect(tmp_path / "old" / "ledger.sqlite")) as older:
        assert older.execute("PRAGMA user_version").fetchone() == (4,) and len(schema.MIGRATIONS) > 4


def test_a_damaged_record_is_reported_on_its_page_alone(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE calls SET body = x'00' WHERE episode_id = 2")
    with running(ViewOptions(root=tmp_path)) as url:
        assert get(f"{url}api/runs/run").status_code == 200
        assert get(f"{url}api/runs/run/steps/1").status_code == 200
        answer = get(f"{url}api/runs/run/groups/0/rollouts/1")
        assert answer.status_code == 422 and "damaged" in answer.json()["error"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to read as")
def test_a_crashed_run_in_a_folder_that_cannot_be_written_is_shown(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    with made.begin() as ledger:
        made.make_step(ledger)
        ledger.dispatched(99, (0, 99), "the last one", "countdown", 4, 1)
        assert ledger.account().dispatched == 20
        copy = tmp_path / "copy"  # with the log that the writer had not folded into the file
        shutil.copytree(made.folder, copy)
    assert (copy / "ledger.sqlite-wal").stat().st_size
    (copy / "ledger.sqlite-shm").unlink()
    for path in (copy, *copy.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    program = (
        "import os, sys; from pathlib import Path; from headrace.viewer.store import RunShelf\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "shelf = RunShelf(Path(sys.argv[1]))\n"
        "with shelf.runs()[0].ledger() as reader: print(reader.account().dispatched)\n"
        "shelf.close()"
    )
    done = subprocess.run([sys.executable, "-c", program, str(copy)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "20", done.stderr


def test_states_of_a_run(tmp_path: Path) -> None:
    shelf = RunShelf(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    finished_run(tmp_path / "done")
    crashed_run(tmp_path / "killed")
    stopped = MadeRun(tmp_path / "stopped")
    with stopped.begin() as ledger:
        stopped.make_step(ledger)
    failed = MadeRun(tmp_path / "failed")
    with failed.begin() as ledger:
        failed.make_step(ledger)
    (failed.folder / "log.txt").write_text("2026-01-01 10:00:00,000 INFO the run failed: EngineError: it is gone\n")
    states = {view.id: view.state() for view in shelf.runs()}
    assert {name: state.word for name, state in states.items()} == {
        "empty": "empty", "done": "done", "killed": "crashed", "stopped": "interrupted", "failed": "failed",
    }  # fmt: skip
    assert states["failed"].why == "EngineError: it is gone"
    lock = FileLock(stopped.folder / "lock")
    assert state_of(stopped.folder, []).word == "running"
    lock.release()
    shelf.close()


def test_metrics_are_read_on_from_where_they_ended(tmp_path: Path) -> None:
    table, path = MetricsTable(tmp_path), tmp_path / "metrics.jsonl"
    table.refresh()
    assert table.steps == []
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": null, "b": 5}\n{"step": 3, "a"')
    table.refresh()
    assert table.steps == [1, 2] and table.row(2) == {"b": 5.0} and table.last("a") == 1.0
    with path.open("a") as file:
        file.write(': 3.0}\nnonsense\n{"step": 2, "a": 7.0}\n')
    table.refresh()
    assert table.series(["a", "b", "c"]) == ([1, 2, 3], {"a": [1.0, 7.0, 3.0], "b": [None, 5.0, None]})
    assert table.series(["a"], after=1, points=1)[0] == [2, 3]
    other = tmp_path / "new"
    other.write_text('{"step": 1, "a": 9.0}\n')
    other.replace(path)  # as a run does that resumes from a checkpoint
    table.refresh()
    assert table.steps == [1] and table.last("a") == 9.0


def test_a_search_goes_on_where_a_page_ended(root: Path) -> None:
    from headrace.viewer.search import search_page

    shelf = RunShelf(root)
    view = shelf.run("finished")
    every = search_page(view, Filters(), None, 200)
    seen, before = [], None
    while True:
        page = search_page(view, Filters(text="answer"), before, 7)
        seen += [row["episode_id"] for row in page["episodes"]]
        before = page["next"]
        if before is None:
            break
    said = [row["episode_id"] for row in every["episodes"] if row["task_id"] != "a task that breaks"]
    assert seen == said == sorted(seen, reverse=True) and every["total"] == 69
    shelf.close()


def test_an_event_comes_whenever_the_run_changes(root: Path, url: str) -> None:
    with httpx2.stream("GET", f"{url}/api/runs/inner~crashed/events", timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: change" and json.loads(next(lines).removeprefix("data: ")) == {"state": "crashed"}
        os.utime(root / "inner" / "crashed" / "metrics.jsonl")
        assert next(line for line in lines if line) == "event: change"
