"""A step through Tinker is the step that the local backend makes, for every loss that both have."""

from __future__ import annotations

import pytest
from tinker_equality import BUILT_IN, CASES, compare

pytestmark = pytest.mark.usefixtures("through_tinker")


WAYS = [(name, one_pass) for name in CASES for one_pass in (False, True) if name in BUILT_IN or not one_pass]


QUICK = [("ppo_clip", False), ("ppo_clip", True), ("cispo", True), ("dpo", False)]


@pytest.mark.parametrize(
    ("name", "one_pass"), [pytest.param(*way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS]
)
async def test_three_steps_end_where_the_local_backend_ends(name: str, one_pass: bool) -> None:
    found = await compare(name, seed=5, one_pass=one_pass)
    assert found["moved"] > 0.01  # or nothing was compared
    assert found["apart"] < 2e-5
    assert found["on the way"] < 2e-5
