"""Decoding through transformers says so where an older one is installed."""

from __future__ import annotations

import pytest
import transformers

from headrace.errors import ModelError
from headrace.models.fallback import TransformersModel
from tiny import tiny_model


def test_an_older_transformers_is_refused_with_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    monkeypatch.setattr(transformers, "__version__", "5.10.4")
    with pytest.raises(ModelError, match=r"transformers 5\.10\.4 cannot decode .* 5\.19; .* engine.name = \"vllm\""):
        TransformersModel(model)
