"""Texts of single tokens, from tokenizer.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import examples
from headrace.models.catalog import model_folder
from headrace.models.token_text import read_token_texts, token_texts_of_run

FILE = model_folder("bundled") / "tokenizer.json"


@examples
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_texts_of_tokens_together_are_the_text(text: str) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(FILE)).encode(text, add_special_tokens=False).ids
    found = read_token_texts(FILE)
    assert found is not None and "".join(found.texts(ids)) == text


def test_special_unknown_and_opaque_tokens_show_as_what_they_are() -> None:
    found = read_token_texts(FILE)
    assert found is not None
    assert found.texts([1, 999_999, {"image": 1}]) == ["<|im_start|>", "⟨999999⟩", "⟨block⟩"]
    assert {1, 2} <= found.special


def test_pieces_with_marks_for_spaces_and_for_bytes_are_read(tmp_path: Path) -> None:
    content = {
        "model": {"type": "BPE", "vocab": {"▁Hello": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "x": 4}},
        "added_tokens": [{"id": 5, "content": "</s>", "special": True}],
        "decoder": {"type": "Replace"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = read_token_texts(tmp_path / "tokenizer.json")
    assert found is not None
    assert found.texts([0, 1, 2, 3, 4, 5]) == [" Hello", "", "", "€", "x", "</s>"]
    assert found.texts([1, 5]) == ["", "�</s>"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer_gives_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert read_token_texts(tmp_path / "tokenizer.json") is None
    assert token_texts_of_run(tmp_path, {"model": {"name": "bundled"}}) is not None
    assert token_texts_of_run(tmp_path, {"model": {"name": "no/such"}}) is None
    assert token_texts_of_run(tmp_path, {}) is None
