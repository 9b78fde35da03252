"""Suites that every backend and every engine must pass."""

import pytest

pytest.register_assert_rewrite(
    "contracts.backend_contract",
    "contracts.engine_contract",
    "contracts.engine_harness",
    "contracts.engine_sampling",
    "contracts.engine_weights",
    "contracts.hf_policy",
)
