"""The ledger's file: kills, full disks, folders that cannot be written, other versions, two writers."""

from __future__ import annotations

import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import LedgerError
from headrace.ledger import Ledger, LedgerReader, schema
from headrace.ledger import ledger as ledger_module
from headrace.ledger.files import connect_writer
from ledger_data import dispatch, play, simple_episode, train

HERE = Path(__file__).parent
PATHS = os.environ | {"PYTHONPATH": str(HERE.parent)}
NOBODY = 65534

# ---- kills -----------------------------------------------------------------------------------------------------------


def write_for_ever(folder: Path) -> None:
    """Run in a process of its own, until it is killed. Goes on where the file ends."""
    ledger = Ledger.open(folder)
    last = ledger.last_group_id()
    print("writing", flush=True)
    for step in range(0 if last is None else last + 1, 10**9):
        dispatch(ledger, step)
        play(ledger, simple_episode(step))
        ledger.decided(step, "whole")
        train(ledger, step, [step])


# which steps each event of a step has left its trace of, in the order in which the events were handed over
TRACES = (
    "SELECT group_id FROM groups",
    "SELECT group_id FROM episodes",
    "SELECT group_id FROM calls JOIN episodes USING (episode_id)",
    "SELECT group_id FROM bodies JOIN episodes USING (episode_id) WHERE state = 'finished'",
    "SELECT group_id FROM groups WHERE state != 'dispatched'",
    "SELECT group_id FROM batches JOIN batch_groups USING (step)",
    "SELECT step FROM batches WHERE committed_at IS NOT NULL",
    "SELECT group_id FROM groups WHERE state = 'trained'",
    "SELECT version - 1 FROM publications",
)


def check_is_prefix(path: Path, last: int) -> None:
    """Every event of the steps before the last is there; of the last, so many from the first on."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    found = [{step for (step,) in connection.execute(query)} for query in TRACES]
    connection.close()
    assert all(steps | {last} == set(range(last + 1)) for steps in found)
    reached = [last in steps for steps in found]
    assert reached == sorted(reached, reverse=True)


def killed_while_writing(folder: Path, after_s: float) -> None:
    code = "import sys; from pathlib import Path; import test_ledger_files as t; t.write_for_ever(Path(sys.argv[1]))"
    writer = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, cwd=HERE, env=PATHS)
    assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
    time.sleep(after_s)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()


def test_a_killed_writer_leaves_a_prefix_of_what_it_was_handed(tmp_path: Path):
    rng = random.Random(5)
    sizes = [0]
    for number in range(20):
        if number >= 5 and sizes[-1]:
            break
        killed_while_writing(tmp_path, after_s=rng.uniform(0.0, 0.4) * max(1, number - 3))  # a crowded machine is slow
        with LedgerReader.read(tmp_path) as reader:
            account = reader.account()
            trained = sum(record.decision == "trained" for record in reader.episodes())
            last = reader.last_group_id()
            if last is None:  # killed before its first commit
                continue
            assert (account.dispatched, account.trained) == (last + 1, trained)
            sizes.append(last)
        check_is_prefix(tmp_path / "ledger.sqlite", last)
        with Ledger.open(tmp_path) as ledger:  # and goes on: what was interrupted is made good
            play_again(ledger, last)
    assert sizes == sorted(sizes) and sizes[-1] > 0, "no writer came to write anything"


def play_again(ledger: Ledger, group_id: int) -> None:
    """Repeat what is repeatable, as a resumed run does."""
    for unfinished in ledger.unfinished():
        assert unfinished.group.group_id == group_id
        if not unfinished.episodes:
            play(ledger, simple_episode(group_id, attempt=1))
        ledger.decided(group_id, "whole")
    train(ledger, group_id, [group_id])
    assert ledger.account().pending == 0


def test_processes_distinguish_a_kill_from_an_end(tmp_path: Path):
    killed_while_writing(tmp_path, after_s=0.1)
    with Ledger.open(tmp_path) as ledger:
        ledger.resumed(40)
    with LedgerReader.read(tmp_path) as reader:
        first, second = reader.processes()
    assert first.ended_at is None and first.resumed_from is None
    assert second.ended_at is not None and second.resumed_from == 40 and second.pid == os.getpid()


# ---- failures of the disk --------------------------------------------------------------------------------------------


def fill(ledger: Ledger) -> None:
    """Record until the ledger complains."""
    for group_id in range(100_000):
        dispatch(ledger, group_id)
        play(ledger, simple_episode(group_id, words=500))
        if group_id % 50 == 0:
            ledger.flush()


def check_still_sound(folder: Path) -> None:
    with LedgerReader.read(folder) as reader:
        records = list(reader.episodes())
        assert records and len(records) <= reader.account().dispatched
        assert all(record.episode.task_id == f"task {record.episode.group_id}" for record in records)
    connection = sqlite3.connect(folder / "ledger.sqlite")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_full_disk_is_an_error_and_nothing_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def connect(path: Path) -> sqlite3.Connection:
        connection = connect_writer(path)
        connection.execute("PRAGMA max_page_count = 200")
        return connection

    monkeypatch.setattr(ledger_module, "connect_writer", connect)
    with Ledger.open(tmp_path) as ledger:
        with pytest.raises(LedgerError, match=r"cannot write the ledger .*full; free some space.* again"):
            fill(ledger)
        for refused in (lambda: dispatch(ledger, 5), ledger.flush, ledger.account):
            with pytest.raises(LedgerError, match="full"):
                refused()
    check_still_sound(tmp_path)
    monkeypatch.undo()
    with Ledger.open(tmp_path) as ledger:  # space was freed
        dispatch(ledger, 10**6)
        assert ledger.last_group_id() == 10**6


def test_a_failing_write_of_the_system_is_an_error_and_nothing_is_damaged(tmp_path: Path):
    code = (
        "import resource, sys; from pathlib import Path; from test_ledger_files import fill, Ledger; "
        "ledger = Ledger.open(Path(sys.argv[1])); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000)); fill(ledger)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=HERE, env=PATHS)
    assert done.returncode == 1
    assert "LedgerError: cannot write the ledger" in done.stderr.strip().splitlines()[-1]
    check_still_sound(tmp_path)


def test_a_failure_that_nobody_was_shown_is_raised_by_close(tmp_path: Path):
    ledger = Ledger.open(tmp_path)
    ledger.decided(7, "whole")
    with pytest.raises(LedgerError, match="never dispatched"):
        ledger.close()
    Ledger.open(tmp_path).close()  # the lock was let go of


def test_a_full_queue_waits_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.ledger.writer.MOST_WAITING", 3)
    with Ledger.open(tmp_path) as ledger:
        for group_id in range(50):
            dispatch(ledger, group_id)
        assert ledger.account().dispatched == 50


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def unprivileged(action: Callable[[], object]) -> str:
    """What an action answers, or complains of, when done by someone who may not write everywhere."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setuid(NOBODY)
            answer = str(action())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


def test_a_folder_that_cannot_be_written_is_an_error(open_folder: Path):
    open_folder.chmod(0o555)
    said = unprivileged(lambda: Ledger.open(open_folder))
    assert said.startswith(f"LedgerError: cannot open the ledger {open_folder}")
    assert "make the folder writable, or choose another with --run-dir" in said


def test_a_finished_ledger_is_read_where_nothing_can_be_written(open_folder: Path):
    with Ledger.open(open_folder) as ledger:
        dispatch(ledger, 0)
    open_folder.chmod(0o555)
    assert unprivileged(lambda: LedgerReader.read(open_folder).account().dispatched) == "1"
    open_folder.chmod(0o755)


# ---- what is in the folder -------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path):
    code = "import sys; from pathlib import Path; from headrace.ledger import Ledger; Ledger.open(Path(sys.argv[1]))"
    with Ledger.open(tmp_path):
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
        assert f"process {os.getpid()} on {socket.gethostname()} writes the ledger" in done.stderr
        with pytest.raises(
            LedgerError, match=r"this very process writes the ledger .*; wait for it, end it, or choose"
        ):
            Ledger.open(tmp_path)
        LedgerReader.read(tmp_path).close()
    Ledger.open(tmp_path).close()


def test_a_child_that_was_forked_does_not_hold_the_lock(tmp_path: Path):
    ledger = Ledger.open(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        ledger.close()
        Ledger.open(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_ledger_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(LedgerError, match=r"there is no ledger .*name the folder of a run"):
        LedgerReader.read(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("open_it", [Ledger.open, LedgerReader.read])
def test_what_is_not_a_ledger_is_refused_and_left_alone(tmp_path: Path, open_it: Callable[[Path], object]):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"these are my notes, not a database " * 40)
    with pytest.raises(LedgerError, match="not a ledger"):
        open_it(tmp_path)
    assert path.read_bytes().startswith(b"these are my notes")
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE recipes (name)")
    other.close()
    with pytest.raises(LedgerError, match="not a ledger: it is some other program's database"):
        open_it(tmp_path)


@pytest.mark.parametrize("open_it", [Ledger.open, LedgerReader.read])
def test_a_newer_ledger_is_refused(tmp_path: Path, open_it: Callable[[Path], object]):
    Ledger.open(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as newer:
        newer.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    newer.close()
    with pytest.raises(
        LedgerError, match=r"has version \d+, .* versions up to \d+; use the Headrace that wrote it, or a new"
    ):
        open_it(tmp_path)


def test_an_empty_file_becomes_a_ledger(tmp_path: Path):
    (tmp_path / "ledger.sqlite").touch()  # as a kill right after its creation leaves it
    with pytest.raises(LedgerError, match="it is empty"):
        LedgerReader.read(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        dispatch(ledger, 0)
        assert ledger.account().dispatched == 1


@pytest.mark.parametrize("open_it", [Ledger.open, LedgerReader.read])
def test_an_older_ledger_is_migrated_and_keeps_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_it: Callable[[Path], LedgerReader]
):
    with Ledger.open(tmp_path) as ledger:
        dispatch(ledger, 0)
    added = ("ALTER TABLE groups ADD COLUMN colour TEXT", "UPDATE groups SET colour = 'blue'")
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, added])
    monkeypatch.setattr("headrace.ledger.files.MIGRATIONS", schema.MIGRATIONS)
    with open_it(tmp_path) as reader:
        assert reader.account().dispatched == 1
        assert reader.rows("SELECT colour, user_version FROM groups, pragma_user_version()") == [
            ("blue", len(schema.MIGRATIONS))
        ]


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Ledger.open(tmp_path).close()
    broken = ("ALTER TABLE groups ADD COLUMN colour TEXT", "ALTER TABLE no_such_table ADD COLUMN x")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, broken])
        patch.setattr("headrace.ledger.files.MIGRATIONS", schema.MIGRATIONS)
        with pytest.raises(LedgerError, match="no such table"):
            Ledger.open(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        assert "colour" not in [row[0] for row in ledger.rows("SELECT name FROM pragma_table_info('groups')")]
