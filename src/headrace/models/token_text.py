"""What single tokens say, from tokenizer.json alone: to look at tokens, no tokenizer library is needed."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.models.catalog import CATALOG, model_folder
from headrace.run.checkpoint import list_checkpoints

_FILE = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
_LARGEST = 256 << 20  # bytes of a tokenizer.json


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Texts by token id. A token that ends within a character shows its bytes; `special` are control tokens."""

    pieces: dict[int, bytes]
    special: frozenset[int] = field(default_factory=frozenset)

    def texts(self, ids: Sequence[Any]) -> list[str]:
        """One text per id; together they are the decoded text. An id that is not known shows as itself."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found: list[str] = []
        for token in ids:
            piece = self.pieces.get(token) if isinstance(token, int) else None
            if piece is None or token in self.special:
                lost = decoder.decode(b"", final=True)
                decoder.reset()
                said = _unknown(token) if piece is None else piece.decode("utf-8", "replace")
                found.append(lost + said)
            else:
                found.append(decoder.decode(piece))
        return found


def _unknown(token: Any) -> str:
    return f"⟨{token}⟩" if isinstance(token, int) else "⟨block⟩"


def read_token_texts(path: Path) -> TokenTexts | None:
    """From a tokenizer.json; None if it is missing, or of a kind whose pieces cannot be read one by one."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        return _read(str(path), path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@cache
def _read(path: str, _changed: int) -> TokenTexts:
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    listed = vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], n) for n, row in enumerate(vocabulary))
    to_bytes = _of_byte_level if _is_byte_level(content) else _of_spaces
    pieces = {int(number): to_bytes(str(piece)) for piece, number in listed}
    added = content.get("added_tokens") or []
    pieces |= {int(token["id"]): str(token["content"]).encode("utf-8", "replace") for token in added}
    return TokenTexts(pieces, frozenset(int(token["id"]) for token in added if token.get("special")))


def _is_byte_level(content: dict[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])


@cache
def _alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: printable ones as they are, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _of_byte_level(piece: str) -> bytes:
    letters = _alphabet()
    if all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return piece.encode("utf-8", "replace")


def _of_spaces(piece: str) -> bytes:
    found = _BYTE.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece.replace(_SPACE, " ").encode("utf-8", "replace")


def token_texts_of_run(run_dir: Path, config: dict[str, Any]) -> TokenTexts | None:
    """The tokenizer of a run: of its checkpoints, or of the model that its configuration names, if it is here."""
    for path in _places(run_dir, config):
        found = read_token_texts(path)
        if found is not None:
            return found
    return None


def _places(run_dir: Path, config: dict[str, Any]) -> Iterable[Path]:
    yield run_dir / _FILE
    for checkpoint in reversed(list_checkpoints(run_dir)):
        yield checkpoint / "model" / _FILE
        yield checkpoint / _FILE
    section = config.get("model")
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name:
        return
    if name in CATALOG:
        try:
            yield model_folder(name) / _FILE
        except HeadraceError:  # no home folder
            return
        return
    yield Path(name).expanduser() / _FILE
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    yield from sorted((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob(f"*/{_FILE}"))
