"""The comparison with TRL is fair only if both sides have the same tokens to read and as many to sample."""

from __future__ import annotations

from pathlib import Path

from _trl_side import Work
from transformers import AutoTokenizer
from vs_trl import make_prompts, train_headrace

from headrace.models.catalog import resolve_model


def test_prompts_have_the_same_ids_for_transformers() -> None:
    folder = resolve_model("bundled")
    texts, ids = make_prompts(folder, 8)
    assert AutoTokenizer.from_pretrained(folder)(text=texts)["input_ids"] == ids
    assert {len(row) for row in ids} == {60}
    assert len(set(texts)) == 8


def test_headrace_side_samples_all_tokens_whatever_ends_a_sequence(tmp_path: Path) -> None:
    folder = resolve_model("bundled")
    texts, ids = make_prompts(folder, 4)
    work = Work(folder, texts, ids, steps=2, prompts_per_step=2, group_size=8, new_tokens=40, threads=0)
    figures = train_headrace(work, tmp_path)
    assert figures.generated_tokens == [640, 640]
    assert len(figures.step_s) == len(figures.generate_s) == 2
    assert figures.notes["last_step"]["response/length_mean"] == 40
    assert figures.notes["last_step"]["reward/uniform_groups"] < 1
