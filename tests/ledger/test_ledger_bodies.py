"""Bodies that no run has written: damaged ones, and ones that fill the memory. Each is refused in a line."""

from __future__ import annotations

import sqlite3
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest

from headrace.cli.main import run
from headrace.errors import LedgerError
from headrace.ledger import Ledger, pack
from headrace.ledger.pack import expand, pack_bytes, pack_value, unpack, unpack_value
from headrace.ledger.rows import unpack_rows
from ledger_data import play, simple_episode

MOST = 1 << 20


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what goes beyond it is made quickly."""
    monkeypatch.setattr(pack, "MOST_BYTES", MOST)


def bomb(megabytes: int) -> bytes:
    """A body of some kilobytes that inflates to so much: one flushed block again and again."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = deflater.compress(bytes(1 << 20)) + deflater.flush(zlib.Z_FULL_FLUSH)
    return b"\1" + block * megabytes + zlib.compressobj(9, zlib.DEFLATED, -15).flush()


def test_a_body_that_inflates_to_gigabytes_is_refused_before_it_does() -> None:
    body = bomb(4096)
    tracemalloc.start()
    with pytest.raises(LedgerError, match=f"inflate to more than {MOST}; put ledger.sqlite back"):
        unpack(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MOST + 2 * len(body)


def test_the_limit_itself_is_read_and_written_and_one_byte_more_is_neither() -> None:
    fits = "a" * (MOST - 4 - len('["",[]]'))
    assert unpack_value(pack_value(fits)) == fits
    with pytest.raises(LedgerError, match=f"{MOST + 1} bytes as one record"):
        pack_value(fits + "a")


@pytest.mark.parametrize(
    ("lengths", "fails"), [((3, 7, 1, 8), False), ((1 << 40, 7), True), ((MOST // 8, 7, 1, 8), True)]
)
def test_run_lengths_stand_for_no_more_than_a_body_holds(lengths: tuple[int, ...], fails: bool) -> None:
    if fails:
        with pytest.raises(LedgerError, match="numbers"):
            expand(lengths)
    else:
        assert expand(lengths) == (7, 7, 7, 8)


def test_rows_with_more_tokens_than_a_body_holds_are_refused() -> None:
    columns = [struct.pack("<q", value) for value in (0, 0, 0, 1 << 40, 1, 0)]
    text = '[["agent"],["q1","q1","q1","q1","q1","q1","d1"]]'
    with pytest.raises(LedgerError, match="numbers"):
        unpack_rows(pack_bytes(text, *columns, struct.pack("<d", 1.0)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\1no deflate",
        b"\0\xff\xff\xff\xff[]",
        b"\0\x02\0\0\0[]",
        pack_bytes('[1,["I4000000000"]]', b"1234"),
        pack_bytes('[1,["Z1"]]', b"1234"),
        pack_bytes("[" * 100_000),
        pack_value("long" * 1000)[:-20],
    ],
    ids=["empty", "no length", "not deflated", "cut text", "no pair", "cut array", "unknown type", "nested", "cut"],
)
def test_a_damaged_body_is_one_line(body: bytes) -> None:
    with pytest.raises(LedgerError, match=r"in the ledger is damaged: .*; put ledger\.sqlite back from a copy"):
        unpack(body)


def test_a_crafted_ledger_is_refused_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.dispatched(0, (0, 0), "t", "default", 1, 0)
        play(ledger, simple_episode(0, 0))
    with sqlite3.connect(tmp_path / "ledger.sqlite") as connection:
        connection.execute("UPDATE bodies SET body = ?", (bomb(64),))
    assert run(["ledger", str(tmp_path), "--export", str(tmp_path / "e.jsonl")]) == 2
    err = capsys.readouterr().err
    assert "is damaged" in err and "the episode of group 0, rollout 0: its" in err and err.count("\n") == 1
