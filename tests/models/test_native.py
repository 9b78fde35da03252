"""The native kernels against plain torch expressions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engines.torch.sampling import _inverse_cdf
from headrace.models.kernels import cpu as native
from headrace.models.kernels.cpu import Kernels, build
from headrace.utils.openmp import loaded_runtime


@pytest.fixture(params=[1, 2])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    found = native.kernels()
    if found is None:
        pytest.skip("no C compiler here")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield found
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def inside(rows: int, width: int) -> Tensor:
    """Random rows that are a slice of wider ones."""
    return torch.randn(rows, width + 13)[:, 5 : 5 + width]


def close(got: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


ROWS_AND_SIZES = [(1, 1), (1, 576), (3, 37), (32, 576), (257, 576), (1100, 24)]


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("rows,size", ROWS_AND_SIZES)
def test_rms_norm_is_the_plain_expression(kernels: Kernels, rows: int, size: int) -> None:
    x, weight = inside(rows, size), torch.randn(size)
    out, inverse = kernels.rms_norm(x, weight, 1e-5)
    close(out, plain_norm(x.double(), weight.double(), 1e-5))
    close(inverse, (x.double().square().mean(-1) + 1e-5).rsqrt())


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("rows,size", ROWS_AND_SIZES)
def test_rms_norm_backward_is_autograd(kernels: Kernels, rows: int, size: int, added: bool) -> None:
    x, weight, grad = inside(rows, size), torch.randn(size), inside(rows, size)
    add = inside(rows, size) if added else None
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    plain_norm(x64, weight64, 1e-5).backward(grad.double())
    assert x64.grad is not None and weight64.grad is not None
    grad_x, grad_weight = kernels.rms_norm_backward(grad, x, kernels.rms_norm(x, weight, 1e-5)[1], weight, add)
    close(grad_x, x64.grad if add is None else x64.grad + add, 1e-5)
    close(grad_weight, weight64.grad, 1e-5 * rows**0.5)


@pytest.mark.parametrize("rows,width", [(1, 1), (1, 1536), (3, 37), (32, 1536)])
def test_swiglu_and_its_gradient_are_autograd(kernels: Kernels, rows: int, width: int) -> None:
    gate_up, grad = inside(rows, 2 * width) * 5, inside(rows, width)
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    wanted = F.silu(gate) * up
    wanted.backward(grad.double())
    assert wide.grad is not None
    close(kernels.swiglu(gate_up), wanted)
    grad_gate_up, out = kernels.swiglu_backward(grad, gate_up)
    close(grad_gate_up, wide.grad, 5e-6)
    close(out, wanted)


def test_swiglu_of_extreme_gates_is_finite(kernels: Kernels) -> None:
    gates = torch.tensor([-1e4, -104.0, -89.0, -87.0, 0.0, 87.0, 89.0, 1e4])
    out = kernels.swiglu(torch.cat([gates, torch.ones(8)])[None])[0]
    close(out, F.silu(gates.double()))


def angles(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    turn = torch.rand(rows, dim // 2).mul(6).repeat(1, 2)
    return turn.cos(), turn.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] rotated as Llama does it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


@pytest.mark.parametrize("rows,heads,dim", [(1, 1, 8), (5, 9, 64), (300, 3, 40)])
def test_rope_rotates_the_first_heads_and_back(kernels: Kernels, rows: int, heads: int, dim: int) -> None:
    x, (cos, sin) = inside(rows, (heads + 2) * dim), angles(rows, dim)
    before = x.clone()
    kernels.rope_(x, cos, sin, heads)
    wanted = rotated(before[:, : heads * dim].view(rows, heads, dim), cos[:, None], sin[:, None])
    close(x[:, : heads * dim], wanted.reshape(rows, -1))
    assert torch.equal(x[:, heads * dim :], before[:, heads * dim :])
    kernels.rope_(x, cos, sin, heads, -1)
    close(x, before)


SHAPES = [(1, 1, 1, 8), (1, 9, 3, 64), (5, 8, 8, 40), (4, 4, 1, 128), (6, 6, 2, 32), (2, 9, 3, 104)]


@pytest.mark.parametrize("slots,heads,kv_heads,dim", SHAPES)
def test_decode_attention_is_softmax_attention(
    kernels: Kernels, slots: int, heads: int, kv_heads: int, dim: int
) -> None:
    capacity = 200
    qkv, (cos, sin) = inside(slots, (heads + 2 * kv_heads) * dim), angles(slots, dim)
    keys, values = torch.randn(2, slots + 1, kv_heads, capacity, dim).unbind(0)
    lengths = torch.tensor([0, 199, 64, 63, 7, 130])[:slots]
    for b, length in enumerate(lengths.tolist()):
        keys[b, :, length:], values[b, :, length:] = torch.nan, torch.nan  # what is not written yet
    old_keys, old_values = keys.clone(), values.clone()
    out = kernels.decode_attention(qkv, cos, sin, keys, values, lengths, heads, kv_heads)
    for b, length in enumerate(lengths.tolist()):
        q, k, v = qkv[b].view(-1, dim).split([heads, kv_heads, kv_heads])
        old_keys[b, :, length], old_values[b, :, length] = rotated(k, cos[b], sin[b]), v
        group = heads // kv_heads
        seen_k = old_keys[b, :, : length + 1].repeat_interleave(group, 0).double()
        seen_v = old_values[b, :, : length + 1].repeat_interleave(group, 0).double()
        query = rotated(q, cos[b], sin[b]).double()[:, None]
        shares = torch.softmax(query @ seen_k.mT / dim**0.5, -1)
        close(out[b], (shares @ seen_v).reshape(-1), 5e-6)
    torch.testing.assert_close(keys, old_keys, equal_nan=True)
    torch.testing.assert_close(values, old_values, equal_nan=True)


def test_a_full_slot_is_refused_and_nothing_is_written(kernels: Kernels) -> None:
    keys, (cos, sin) = torch.zeros(2, 1, 4, 8), angles(2, 8)
    with pytest.raises(IndexError, match="capacity 4"):
        kernels.decode_attention(torch.ones(2, 24), cos, sin, keys, keys.clone(), torch.tensor([1, 4]), 1, 1)
    assert not keys.any()


@pytest.mark.parametrize("rows,size", [(1, 1), (1, 49152), (7, 1003), (5, 255)])
def test_chosen_logprobs_are_log_softmax(kernels: Kernels, rows: int, size: int) -> None:
    logits, targets = inside(rows, size) * 6, torch.randint(size, (rows,))
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0, 1.3])[:rows]
    if size > 1:
        logits[:, (targets[0] + 1) % size] = -torch.inf
    wanted = torch.log_softmax(logits.double() / temperatures[:, None], -1)
    logprobs, entropy = kernels.chosen_logprobs_(logits, targets, temperatures)
    close(logprobs, wanted.gather(1, targets[:, None])[:, 0], 1e-6)
    close(entropy, -(wanted.exp() * wanted).nan_to_num(0).sum(-1), 1e-6)
    close(logits, wanted.exp(), 1e-6)
    error = ((logits - wanted.exp()) / wanted.exp()).abs().nan_to_num(0).max()
    assert error < 1e-5  # small probabilities are exact as well


@pytest.mark.parametrize("size", [1, 255, 256, 1003, 49152])
def test_samples_are_those_of_the_torch_sampler(kernels: Kernels, size: int) -> None:
    logits, uniforms = inside(400, size) * 3, torch.rand(400, dtype=torch.float64)
    tokens, logprobs = kernels.sample(logits, uniforms)
    wanted, _ = _inverse_cdf(logits.double(), uniforms)  # float64: torch's operations
    assert (tokens == wanted).double().mean() > 0.99
    close(logprobs, logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0], 1e-5)
    alone, _ = kernels.sample(logits[7:8], uniforms[7:8])
    assert alone.item() == tokens[7]


def test_a_token_of_probability_zero_is_never_chosen(kernels: Kernels) -> None:
    logits = torch.full((4, 1000), -torch.inf)
    logits[:, 300], logits[:, 700] = 0.0, 0.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-53, 0.49], dtype=torch.float64)
    tokens, logprobs = kernels.sample(logits, uniforms)
    assert tokens.tolist() == [300, 700, 700, 300]
    close(logprobs, torch.full((4,), 0.5).log())


def test_a_row_of_nan_gives_a_token_of_the_vocabulary_and_says_nan(kernels: Kernels) -> None:
    tokens, logprobs = kernels.sample(torch.full((2, 1003), torch.nan), torch.tensor([0.0, 0.9], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 1003)).all() and logprobs.isnan().all()


def test_the_same_rows_give_the_same_bits_on_one_thread_and_on_two() -> None:
    found = native.kernels()
    if found is None:
        pytest.skip("no C compiler here")
    x, weight, grad, logits = inside(300, 576), torch.randn(576), inside(300, 576), inside(50, 3001)
    results: list[list[Tensor]] = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        chosen = logits.clone()
        parts = found.chosen_logprobs_(chosen, torch.arange(50), torch.ones(50))
        inverse = found.rms_norm(x, weight, 1e-5)[1]
        results.append([*found.rms_norm_backward(grad, x, inverse, weight), found.swiglu(x), chosen, *parts])
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_there_is_one_openmp_runtime_in_the_process(kernels: Kernels) -> None:
    if loaded_runtime() is None:
        pytest.skip("torch uses no GNU OpenMP here")
    script = (
        "import torch; from headrace.models.kernels import cpu as native; torch.set_num_threads(2);"
        "native.kernels().swiglu(torch.randn(64, 4096));"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l or 'libiomp' in l}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


@pytest.fixture
def afresh() -> Iterator[None]:
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


@pytest.mark.usefixtures("afresh")
def test_there_are_no_kernels_when_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NATIVE", "0")
    assert native.kernels() is None


@pytest.mark.usefixtures("afresh")
def test_there_are_no_kernels_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.kernels() is None


@pytest.mark.usefixtures("afresh")
def test_there_are_no_kernels_when_compiling_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\ntest $1 = --version\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    assert native.kernels() is None
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.usefixtures("afresh")
def test_a_cache_that_cannot_be_written_means_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    assert native.kernels() is None


@pytest.mark.usefixtures("afresh")
def test_the_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    if native.kernels() is None:
        pytest.skip("no C compiler here")
    (library,) = tmp_path.rglob("*.so")
    made = library.stat().st_mtime_ns
    native.kernels.cache_clear()
    assert native.kernels() is not None
    assert library.stat().st_mtime_ns == made and [path.name for path in library.parent.iterdir()] == [library.name]


def cut(library: Path) -> None:
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


def alter(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def let_all_write(library: Path) -> None:
    library.chmod(0o666)


def give_away(library: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(library, 12345, 12345)


def link(library: Path) -> None:
    library.rename(library.with_suffix(".elsewhere"))
    library.symlink_to(library.with_suffix(".elsewhere"))


@pytest.mark.usefixtures("small_build")
@pytest.mark.parametrize("damage", [cut, alter, let_all_write, give_away, link])
def test_a_cached_library_that_is_damaged_or_not_ours_is_compiled_again(
    damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    made = build._library(build._compiler(), openmp=True)
    path, before = made.path, made.path.read_bytes()
    damage(path)
    assert build._library(build._compiler(), openmp=True) == made and path.read_bytes() == before
    assert path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o077 and not path.is_symlink()


@pytest.mark.usefixtures("small_build")
def test_the_folder_of_the_library_is_this_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    build._library(build._compiler(), openmp=True)
    assert folder.stat().st_mode & 0o777 == 0o755
    if not os.geteuid():
        os.chown(folder, 12345, 12345)
        with pytest.raises(build.BuildError, match=r"native belongs to another user \(id 12345\)"):
            build._library(build._compiler(), openmp=True)


@pytest.fixture
def small_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is quickly compiled instead of the kernels."""
    try:
        build._compiler()
    except build.BuildError:
        pytest.skip("no C compiler here")
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "_SOURCES", (tmp_path / "one.c",))
