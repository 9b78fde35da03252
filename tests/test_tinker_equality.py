"""A step through Tinker is the step that the local backend makes, for every loss that both have."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tinker_equality import CASES, compare, tinker_server


@pytest.fixture(scope="module", autouse=True)
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    os.environ["TINKER_TELEMETRY"] = "0"
    with tinker_server(tmp_path_factory.mktemp("tinker")) as address:
        os.environ["TINKER_BASE_URL"] = address
        yield address
        del os.environ["TINKER_BASE_URL"]


@pytest.mark.parametrize("one_pass", [False, True], ids=["two passes", "one pass"])
@pytest.mark.parametrize("name", CASES)
async def test_three_steps_end_where_the_local_backend_ends(name: str, one_pass: bool) -> None:
    found = await compare(name, seed=5, one_pass=one_pass)
    assert found["moved"] > 0.01  # or nothing was compared
    assert found["apart"] < 1e-5
    assert found["on the way"] < 1e-5
