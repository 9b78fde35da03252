"""What a person with a GPU runs, on the strict device: the script itself must not be what fails there."""

from __future__ import annotations

import check_gpu
import pytest
import torch

import sim_device  # noqa: F401  (registers the device)

SIM = "sim:0"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_learner_is_compared_with_the_cpu(dtype: str) -> None:
    checks = [*check_gpu.check_learner(SIM, dtype)]
    assert len(checks) == 2 and all(one.passed for one in checks), checks


def test_a_checkpoint_crosses() -> None:
    (check,) = check_gpu.check_checkpoint(SIM)
    assert check.passed, check


def test_sampler_and_learner_agree() -> None:
    checks = [*check_gpu.check_engine(SIM, "bfloat16")]
    assert all(one.passed for one in checks), checks


def test_speed_and_memory_are_reported() -> None:
    (check,) = check_gpu.check_speed(SIM)
    assert "peak" in check.found and "sim:0 in bfloat16 (optimizer: float32)" in check.found


def test_a_part_that_fails_is_a_line_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image is available")

    (check,) = check_gpu.attempt("engine", broken)  # type: ignore[arg-type]
    assert not check.passed and check.found == "RuntimeError: no kernel image is available"
    assert "Traceback" in capsys.readouterr().err


def test_without_an_accelerator_the_script_says_how_to_try_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpu, "accelerators", list)
    assert check_gpu.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
