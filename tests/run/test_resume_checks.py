"""What is compared beside the settings when a run is resumed: numerics and tasks; and remedies that work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_data import save_one
from headrace.config import RunConfig
from headrace.config.loading import build_config
from headrace.errors import ConfigError
from headrace.run.directory import Claim, claim_run_dir, require_same_tasks


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    return build_config({"run": {"dir": str(tmp_path), "name": "try"}, **sections})


def claim(tmp_path: Path, **sections: Any) -> Claim:
    """Claimed, and given back."""
    with claim_run_dir(config(tmp_path, **sections)) as found:
        return found


async def test_a_remedy_names_a_checkpoint_only_where_there_is_one(tmp_path: Path) -> None:
    folder = claim(tmp_path).folder
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r'run\.resume = "never"$'):
        claim(tmp_path, optimizer={"lr": 1.0})
    await save_one(folder, 5)
    with pytest.raises(ConfigError, match=r'from its newest checkpoint with run\.resume = ".*" and another run\.name$'):
        claim(tmp_path, optimizer={"lr": 1.0})


async def test_a_deterministic_run_without_its_numerics_resumes_with_a_warning(tmp_path: Path) -> None:
    def notes() -> tuple[str, ...]:
        with claim_run_dir(config(tmp_path), {"threads": "any"}) as found:
            return found.notes

    assert notes() == ()
    await save_one(tmp_path / "try", 5)
    assert notes() == ()
    (tmp_path / "try" / "numerics.json").unlink()
    (said,) = notes()
    assert "has no numerics.json" in said and "Put the file back from a copy; or see with `headrace replay" in said


async def test_other_tasks_are_refused_also_when_no_group_was_pending(tmp_path: Path) -> None:
    require_same_tasks(claim(tmp_path), "one")
    require_same_tasks(claim(tmp_path), "two")  # nothing was done: it is another run
    folder = claim(tmp_path).folder
    await save_one(folder, 5)
    require_same_tasks(claim(tmp_path), "two")
    with pytest.raises(ConfigError, match=r"digest two, and now it is three\. Put the tasks back, or start .* newest"):
        require_same_tasks(claim(tmp_path), "three")
    (folder / "tasks.json").unlink()  # as of an older program
    require_same_tasks(claim(tmp_path), "three")
    assert json.loads((folder / "tasks.json").read_text()) == {"digest": "three"}
