"""A digest tells weights apart, whatever their type, size and layout."""

from __future__ import annotations

import pytest
import torch

from headrace.weights.digest import weight_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (64, 96), (300, 1025)])
def test_any_changed_bit_changes_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = weight_digest([weight])
    assert before == weight_digest([weight.clone()])
    content = weight.view(-1).view(torch.uint8)
    for place in {0, content.numel() // 3, content.numel() // 2, content.numel() - 1}:
        content[place] ^= 1
        assert weight_digest([weight]) != before
        content[place] ^= 1
    assert weight_digest([weight]) == before


def test_the_order_of_rows_and_of_tensors_counts() -> None:
    weight, other = torch.randn(128, 4096), torch.randn(128, 4096)
    swapped = weight.clone()
    swapped[[3, 90]] = weight[[90, 3]]
    turned = weight[:, torch.arange(4096).roll(1)]
    found = [weight_digest(w) for w in ([weight, other], [other, weight], [swapped, other], [turned, other])]
    assert len(set(found)) == 4


def test_it_is_of_the_content_not_of_the_layout() -> None:
    weight = torch.randn(40, 60)
    assert weight_digest([weight.T.contiguous().T]) == weight_digest([weight])
