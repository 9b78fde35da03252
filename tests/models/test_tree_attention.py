"""Attention over a tree of pieces by native calls: what torch's operations give, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.models.kernels import cpu as native
from headrace.models.packed import PackedRows
from headrace.models.tree_attention import tree_attention

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="no native kernels on this machine")

STEM = list(range(100, 140))
ROWS: dict[str, list[list[int]]] = {
    "one token": [[1]],
    "two tokens": [[1, 2]],
    "short and long": [[1], [2, 3], [4, 5, 6], list(range(7, 207))],
    "a group": [[*STEM, *range(start, start + 33)] for start in (1000, 2000, 3000)],
    "a stem that is a row": [STEM, [*STEM, 1], [*STEM, 2, 3]],
    "stems on stems": [
        [*STEM, *range(200, 220), 1, 2],
        [*STEM, *range(200, 220), 3],
        [*STEM, *range(200, 220), *range(300, 420), 5],
        [*STEM, *range(200, 220), *range(300, 420), 6, 7, 8, 9],
        [*STEM, 9],
        [8] * 70,
    ],
}


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(rows: PackedRows, qkv: Tensor, kv_heads: int, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(what is seen, the gradient of queries, keys and values)."""
    angles = tuple(torch.randn(len(qkv), 1, qkv.shape[2], generator=torch.manual_seed(1)).to(qkv) for _ in range(2))
    given = qkv.clone().requires_grad_()
    out = tree_attention(given * 1.0, angles, rows, kv_heads)  # type: ignore[arg-type]
    out.backward(grad)
    assert given.grad is not None
    return out.detach(), given.grad


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (4, 4, 32), (9, 3, 64), (6, 2, 48), (8, 1, 16)])
@pytest.mark.parametrize("kind", ROWS)
def test_it_is_what_torch_gives(kind: str, heads: int, kv_heads: int, dim: int) -> None:
    rows = PackedRows.from_rows(ROWS[kind], share=True)
    generator = torch.manual_seed(0)
    qkv = torch.randn(len(rows.ids_N), heads + 2 * kv_heads, dim, generator=generator)
    grad = torch.randn(len(rows.ids_N), heads, dim, generator=generator)
    out, back = attend(rows, qkv, kv_heads, grad)
    wanted, wanted_back = attend(rows, qkv.double(), kv_heads, grad.double())  # float64: torch's operations
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(back.double(), wanted_back, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("threads", [2, 3])
def test_nothing_depends_on_the_number_of_threads(threads: int) -> None:
    rows = PackedRows.from_rows(ROWS["stems on stems"], share=True)
    qkv, grad = torch.randn(len(rows.ids_N), 10, 16), torch.randn(len(rows.ids_N), 6, 16)
    torch.set_num_threads(1)
    wanted = attend(rows, qkv, 2, grad)
    torch.set_num_threads(threads)
    for got, want in zip(attend(rows, qkv, 2, grad), wanted, strict=True):
        assert torch.equal(got, want)


def test_the_tree_says_what_hangs_on_what() -> None:
    tree = PackedRows.from_rows([[*STEM, 1, 2], [*STEM, 3], [5] * 4], share=True).tree
    pieces = {
        (int(start), int(length)): int(end)
        for start, length, end in zip(tree.starts, tree.lengths, tree.ends, strict=True)
    }
    stem = next(key for key in pieces if key[1] == len(STEM))
    assert pieces[stem] == stem[0] + len(STEM) + 3
    assert sorted(tree.lengths.tolist()) == [1, 2, 4, len(STEM)]
    assert tree.longest == len(STEM) + 2
    hanging = [int(tree.first_above[p + 1] - tree.first_above[p]) for p in range(len(tree.starts))]
    assert sorted(hanging) == [0, 0, 1, 1]
