"""Learning, not just running: every recipe gains its margin on held-out problems, on three seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning import RECIPES, run_recipe


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(RECIPES))
def test_held_out_pass_at_1_rises_by_its_margin(name: str, seed: int, work: Path) -> None:
    before, after = run_recipe(name, seed, work)
    assert after - before >= RECIPES[name].margin, f"{before:.1%} → {after:.1%}"
