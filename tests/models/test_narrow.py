"""Layers of a narrow model by native calls: what plain torch expressions give, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.models.kernels import cpu as native
from headrace.models.kernels.cpu import Kernels, narrow
from headrace.models.linear import FusedLinear

EPS = 1e-6
TOKENS = [3, 4, 47, 48, 49, 100, 333]  # a block has 48, and rows are reached as triples


@pytest.fixture(params=[1, 2, 5])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    found = native.kernels()
    if found is None:
        pytest.skip("no native kernels on this machine")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield found
    torch.set_num_threads(before)


def norm_of(width: int) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.rand(width) + 0.5, variance_epsilon=EPS)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


def close(got: Tensor, wanted: Tensor | None) -> None:
    assert wanted is not None
    torch.testing.assert_close(got.double(), wanted.detach(), rtol=2e-5, atol=2e-5 * float(wanted.detach().abs().max()))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 32), (16, 16), (112, 64)])
def test_normed_linear(kernels: Kernels, tokens: int, outputs: int, inputs: int) -> None:
    x, weight, norm = torch.randn(tokens, inputs), torch.randn(outputs, inputs), norm_of(inputs)
    grad, more = torch.randn(tokens, outputs), torch.randn(tokens, inputs)
    out, inverse = narrow.normed_linear(kernels, x, norm, weight)
    got = narrow.normed_linear_backward(kernels, grad, x, inverse, norm, weight, more)
    x_, weight_, norm_ = doubles(x, weight, norm.weight)
    wanted = plain_norm(x_, norm_) @ weight_.t()
    wanted.backward(grad.double())
    close(out, wanted)
    assert x_.grad is not None
    for mine, theirs in zip(got, (x_.grad + more.double(), norm_.grad, weight_.grad), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_added(kernels: Kernels, tokens: int) -> None:
    x, y, weight, grad = (torch.randn(*size) for size in ((tokens, 48), (tokens, 32), (48, 32), (tokens, 48)))
    got = narrow.linear_added_backward(kernels, grad, y, weight)
    x_, y_, weight_ = doubles(x, y, weight)
    wanted = x_ + y_ @ weight_.t()
    wanted.backward(grad.double())
    close(narrow.linear_added(kernels, x, y, weight), wanted)
    for mine, theirs in zip(got, (y_.grad, weight_.grad), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("width", "inner"), [(32, 48), (64, 176)])
def test_feed_forward(kernels: Kernels, tokens: int, width: int, inner: int) -> None:
    x, grad, norm = torch.randn(tokens, width), torch.randn(tokens, width), norm_of(width)
    gate_up, down = torch.randn(2 * inner, width), torch.randn(width, inner)
    out, inverse, opened = narrow.feed_forward(kernels, x, norm, gate_up, down)
    got = narrow.feed_forward_backward(kernels, grad, x, inverse, opened, norm, gate_up, down)
    x_, norm_, gate_up_, down_ = doubles(x, norm.weight, gate_up, down)
    gate, up = (plain_norm(x_, norm_) @ gate_up_.t()).chunk(2, dim=-1)
    wanted = x_ + (F.silu(gate) * up) @ down_.t()
    wanted.backward(grad.double())
    close(out, wanted)
    for mine, theirs in zip(got, (x_.grad, norm_.grad, gate_up_.grad, down_.grad), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("outputs", [3, 16, 33, 97, 511])
def test_chosen_logprobs(kernels: Kernels, tokens: int, outputs: int) -> None:
    x, weight, grad = torch.randn(tokens, 32), torch.randn(outputs, 32), torch.randn(tokens)
    targets, heat = torch.randint(outputs, (tokens,)), torch.rand(tokens) + 0.5
    logprobs, entropies, probs = narrow.chosen_logprobs(kernels, x, weight, targets, heat)
    got = narrow.chosen_logprobs_backward(kernels, grad / heat, x, probs, targets, weight)
    x_, weight_ = doubles(x, weight)
    whole = torch.log_softmax(x_ @ weight_.t() / heat.double()[:, None], dim=-1)
    wanted = whole.gather(1, targets[:, None]).squeeze(1)
    wanted.backward(grad.double())
    close(logprobs, wanted)
    close(entropies, -(whole.exp() * whole).sum(-1))
    close(probs[:, :outputs], whole.exp())
    for mine, theirs in zip(got, (x_.grad, weight_.grad), strict=True):
        close(mine, theirs)


def test_the_same_to_the_bit_every_time(kernels: Kernels) -> None:
    x, grad, norm, weight = torch.randn(500, 64), torch.randn(500, 96), norm_of(64), torch.randn(96, 64)

    def once() -> tuple[Tensor, ...]:
        out, inverse = narrow.normed_linear(kernels, x, norm, weight)
        return out, *narrow.normed_linear_backward(kernels, grad, x, inverse, norm, weight, x)

    first = once()
    for _ in range(5):
        assert all(torch.equal(one, two) for one, two in zip(once(), first, strict=True))


def linear(outputs: int, inputs: int, bias: bool = False) -> FusedLinear:
    return FusedLinear([torch.nn.Linear(inputs, outputs, bias=bias)])


def test_what_is_not_narrow_is_left_to_the_library(kernels: Kernels) -> None:
    x = torch.randn(10, 64)
    assert narrow.narrow_kernels(x, linear(64, 64)) is kernels
    for other in (linear(64, 64, bias=True), linear(40, 64), linear(4096, 64)):
        assert narrow.narrow_kernels(x, other) is None
    assert narrow.narrow_head_kernels(x, linear(97, 64)) is kernels
    for head in (linear(97, 64, bias=True), linear(64, 40), linear(2, 64), linear(4096, 64)):
        assert narrow.narrow_head_kernels(x, head) is None
    assert narrow.narrow_kernels(x[:2], linear(64, 64)) is None
    assert narrow.narrow_kernels(x.double(), linear(64, 64)) is None
