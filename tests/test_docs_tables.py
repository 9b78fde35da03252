"""The tables in docs/ that are made from code."""

from __future__ import annotations

import docs_tables


def test_the_pages_are_up_to_date() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in docs_tables.DOCS.glob("*.md")}
    stale = [page.name for page, text in pages.items() if docs_tables.updated(text) != text]
    assert stale == [], "run scripts/docs_tables.py"


def test_every_table_is_on_a_page_once() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in docs_tables.DOCS.glob("*.md"))
    for name in docs_tables.TABLES:
        assert text.count(f"<!-- table: {name} (scripts/docs_tables.py) -->") == 1, name
