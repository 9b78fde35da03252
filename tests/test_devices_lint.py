"""On a GPU a tensor without a device is on the wrong one, and reading a number inside a loop makes the host wait.

Both are mistakes that no CPU shows, so the source is looked through.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "headrace"
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "from_numpy", "frombuffer", "full", "linspace", "ones",
    "rand", "randn", "randint", "randperm", "tensor", "tril_indices", "zeros",
}  # fmt: skip
WAITS = {"item", "tolist", "numpy", "cpu", "nonzero"}

ON_HOST = {
    "backends/tinker": "the service computes; what comes back is on the host",
    "models/kernels/cpu": "native kernels of the CPU",
    "models/llama.py": "the fast path, which is for the CPU",
    "models/llama_cache.py": "the fast path's cache",
    "run/random_state.py": "states of generators, which torch keeps on the host",
    "tinker_server": "serves from the CPU",
    "weights/vllm_plugin": "what arrives is mapped or received on the host, then moved",
    "weights/shared_memory.py": "memory that processes share is the host's",
}
"""Where tensors are on the host by intention, and why."""
TRANSFERS = {"models/transfer.py", "models/packed.py"}
"""Where arrays become tensors and go up: `upload`, and rows that are packed on the host before they are moved."""

LOOPS = {
    "backends/local/learner.py": {"forward_backward", "_losses", "_head", "_values"},
    "backends/local/token_losses.py": {
        "loss_context",
        "token_losses",
        "without_rejected",
        "_by_role",
        "_apply",
        "_select",
    },
    "models/logprobs.py": {"target_logprobs", "_by_chunks"},
    "models/packed_forward.py": {"hidden", "_packed", "_padded", "_padded_index"},
    "models/row_attention.py": {"attend_rows", "_in_bins", "_sdpa", "_own", "_band", "_end_to_end"},
    "algorithms/losses.py": {"*"},
}
"""Functions that run once per micro-batch. The host waits in `settle` alone, by `download`."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def made_without_device(tree: ast.AST) -> Iterator[int]:
    """Lines that make a tensor and do not say where."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        on_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        names = {keyword.arg for keyword in node.keywords}
        if on_torch and node.func.attr in FACTORIES and not names & {"device", "out"}:
            yield node.lineno


def waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that read from the device."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            yield node.lineno, node.func.attr


def functions(tree: ast.Module, wanted: set[str]) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.name in wanted or "*" in wanted):
            yield node


def excused(name: str) -> bool:
    return name in TRANSFERS or any(name == place or name.startswith(f"{place}/") for place in ON_HOST)


def test_every_tensor_is_made_on_a_device() -> None:
    found = [f"{name}:{line}" for name, tree in modules() if not excused(name) for line in made_without_device(tree)]
    assert found == [], "give device=, use new_zeros and its like, or upload()"


def test_every_excuse_is_needed() -> None:
    makers = {name for name, tree in modules() if [*made_without_device(tree)]}
    for place in (*ON_HOST, *TRANSFERS):
        assert any(name == place or name.startswith(f"{place}/") for name in makers), place


def test_nothing_reads_from_the_device_within_a_micro_batch() -> None:
    trees = dict(modules())
    found = [
        f"{name}:{line} .{what}()"
        for name, wanted in LOOPS.items()
        for function in functions(trees[name], wanted)
        for line, what in waits(function)
    ]
    assert found == [], "keep it on the device; settle() brings all to the host in one transfer"


def test_the_functions_of_the_loop_are_there() -> None:
    trees = dict(modules())
    for name, wanted in LOOPS.items():
        there = {function.name for function in functions(trees[name], {"*"})}
        assert wanted - {"*"} <= there, name


def test_the_lint_sees_what_it_is_for() -> None:
    planted = ast.parse(
        "def hidden(x):\n    y = torch.zeros(3)\n    return y.sum().item(), torch.ones(2, device=x.device)"
    )
    assert [*made_without_device(planted)] == [2]
    assert [*waits(planted)] == [(3, "item")]
