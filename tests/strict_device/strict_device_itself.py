"""The strict device refuses what CUDA refuses, and counts what it should."""

from __future__ import annotations

import pytest
import torch

from sim_device import DEVICE, counted


def test_numbers_are_those_of_the_cpu() -> None:
    x = torch.randn(5, 7)
    assert torch.equal((x.to(DEVICE) @ x.to(DEVICE).t()).cpu(), x @ x.t())


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 3)])
def test_a_cpu_tensor_does_not_join(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(torch.ones(shape, device=DEVICE), torch.ones(shape))


def test_a_cpu_scalar_joins_as_on_cuda() -> None:
    assert (torch.ones(3, device=DEVICE) * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]


def test_numpy_needs_a_copy() -> None:
    with pytest.raises(TypeError, match=r"use Tensor.cpu\(\)"):
        torch.ones(3, device=DEVICE).numpy()


def test_transfers_and_stalls_are_counted() -> None:
    with counted() as seen:
        x = torch.arange(6.0).to(DEVICE)
        x.add_(1).cpu()
        x[0].item()
        x[x > 2]
    assert (seen["up"], seen["down"], seen["stall"]) == (1, 1, 2)


def test_the_gradient_and_the_fused_optimizer_stay_on_the_device() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3, device=DEVICE))
    optimizer = torch.optim.AdamW([weight], fused=True)
    (torch.arange(3.0, device=DEVICE) @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.device == DEVICE
    optimizer.step()
    assert {state.device for state in optimizer.state[weight].values()} == {DEVICE}
