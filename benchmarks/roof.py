"""The hardware limit of this machine, measured in the same run as what is compared with it.

    python benchmarks/roof.py [--json FILE] [--quick]

Prints a Markdown table: matrix products of the shapes that a model's layers have at several batch sizes (a linear
layer in float32, the best of several timings), and how fast memory is read and copied.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _arguments import parsed

from headrace.models.kernels.cpu import kernels

Shape = tuple[int, int]
"""Of a weight: outputs, inputs."""


def best_seconds(call: Callable[[], object], repeats: int = 7, at_least_s: float = 0.05) -> float:
    """The fastest of `repeats` timings of one call; each timing lasts `at_least_s` at least."""
    call()
    began = time.perf_counter()
    call()
    calls = max(1, round(at_least_s / max(time.perf_counter() - began, 1e-9)))
    timings = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        timings.append((time.perf_counter() - began) / calls)
    return min(timings)


def matmul_seconds(rows: int, shape: Shape, repeats: int = 7) -> float:
    """One linear layer without bias on `rows` rows."""
    weight, x = torch.randn(shape), torch.randn(rows, shape[1])
    with torch.no_grad():
        return best_seconds(lambda: F.linear(x, weight), repeats)


def matmul_gflops(rows: int, shapes: Sequence[Shape], repeats: int = 7) -> float:
    """GFLOP/s of these linear layers one after the other: the roof of a pass through them."""
    work = sum(2 * rows * outputs * inputs for outputs, inputs in shapes)
    return work / sum(matmul_seconds(rows, shape, repeats) for shape in shapes) / 1e9


def layer_shapes(config: Any) -> list[Shape]:
    """The linear layers of one decoder layer of a Llama-like model, merged where they read the same input."""
    width, wide = int(config.hidden_size), int(config.intermediate_size)
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    dim = int(getattr(config, "head_dim", None) or width // heads)
    return [((heads + 2 * kv_heads) * dim, width), (width, heads * dim), (2 * wide, width), (width, wide)]


def weight_bytes(config: Any, head: bool) -> int:
    """Of all layers, and of the output head if wanted, in float32."""
    per_layer = sum(outputs * inputs for outputs, inputs in layer_shapes(config))
    last = int(config.vocab_size) * int(config.hidden_size) if head else 0
    return 4 * (int(config.num_hidden_layers) * per_layer + last)


def products() -> list[str]:
    """The ways to multiply that there are on this machine: the names that `stack_seconds` takes."""
    return ["torch", *(["packed"] if torch.backends.mkl.is_available() else []), *(["native"] if kernels() else [])]


def stack_seconds(rows: int, config: Any, head: bool = True, product: str = "torch", repeats: int = 7) -> float:
    """The products of all layers one after the other, and of the output head if wanted, on `rows` rows.

    Every layer has weights of its own, so that they stay in the caches no more than a real model's do. "packed": with
    weights laid out beforehand as MKL likes them for so many rows, which must be redone for new weights. "native": the
    built-in engine's own product.
    """
    shapes = layer_shapes(config) * int(config.num_hidden_layers)
    if head:
        shapes.append((int(config.vocab_size), int(config.hidden_size)))
    weights = [torch.rand(shape) for shape in shapes]
    inputs = {width: torch.rand(rows, width) for width in {shape[1] for shape in shapes}}
    layouts = weights
    if product == "packed":
        layouts = [torch.ops.mkl._mkl_reorder_linear_weight(weight, rows) for weight in weights]

    def walk() -> None:
        for weight, layout in zip(weights, layouts, strict=True):
            x = inputs[weight.shape[1]]
            if product == "packed":
                torch.ops.mkl._mkl_linear(x, layout, weight, None, rows)
            elif product == "native" and (native := kernels()):
                native.few_rows(x, weight, None)
            else:
                F.linear(x, weight)

    with torch.no_grad():
        return best_seconds(walk, repeats)


def read_gbps(megabytes: int = 512) -> float:
    """How fast memory outside the caches is read, in GB/s."""
    data = torch.ones(megabytes * 2**18)
    return data.numel() * 4 / best_seconds(lambda: data.sum()) / 1e9


def copy_gbps(megabytes: int = 512) -> float:
    """How many GB of a large tensor are copied per second."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    return source.numel() * 4 / best_seconds(lambda: target.copy_(source)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the bundled model, fewer sizes")
    given = parsed(parser, {"model": "bundled"})
    torch.set_num_threads(given.threads)

    from transformers import AutoConfig

    from headrace.models.catalog import resolve_model

    config = AutoConfig.from_pretrained(resolve_model(given.model))
    sizes = (1, 32, 1024) if given.quick else (1, 8, 32, 64, 128, 512, 1024, 2048, 4096)
    repeats = 3 if given.quick else 7
    head = (config.vocab_size, config.hidden_size)
    found: dict[str, Any] = {"threads": given.threads, "read_gbps": read_gbps(), "copy_gbps": copy_gbps()}
    table = {}
    print("| rows | layers (GFLOP/s) | output head (GFLOP/s) |")
    print("| --- | --- | --- |")
    for rows in sizes:
        layers, last = matmul_gflops(rows, layer_shapes(config), repeats), matmul_gflops(rows, [head], repeats)
        table[rows] = {"layers_gflops": layers, "head_gflops": last}
        print(f"| {rows} | {layers:.0f} | {last:.0f} |", flush=True)
    print(f"\nmemory: read {found['read_gbps']:.1f} GB/s, copied {found['copy_gbps']:.1f} GB/s")
    if given.json:
        given.json.write_text(json.dumps({**found, "matmul": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
