"""A strict device, "sim", for machines without a GPU: real numbers, and an error wherever CUDA would raise one.

Its tensors wrap tensors of the CPU, which compute. An operation that mixes them with a CPU tensor is refused, as on
CUDA: all but those of no dimension, and indices. Every transfer and every operation that would make the host wait for
the device is counted in `traffic`. Importing this module registers the device in this process for good, which changes
gradient checkpointing on the CPU too: tests that use it run in a process of their own (`strict_device.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "sim"
DEVICE = torch.device("cpu")  # replaced below, once the name is known to torch
aten: Any = torch.ops.aten

_CROSSES = {aten._to_copy.default, aten.copy_.default}
_TAKES_CPU_INDICES = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip
_STALLS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.equal.default, aten.is_nonzero.default, aten.unique_dim.default,
}  # fmt: skip
"""Operations whose result, or its size, the host must wait for."""


class Traffic(Counter[str]):
    """How often tensors went `up` to the device and `down` from it, and how often the host waited (`stall`)."""


traffic = Traffic()


@contextmanager
def counted() -> Iterator[Traffic]:
    """What is moved and waited for within."""
    before, found = Counter(traffic), Traffic()
    yield found
    found.update(Counter(traffic) - before)


class _Module(_DummyBackendModule):
    """What torch asks of a device besides its operations; memory as the tests set it."""

    peak = 0
    memory = 8 * 2**30

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        torch.set_rng_state(state)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = 0) -> str:
        return "strict device on the CPU"

    def synchronize(self, device: Any = 0) -> None:
        traffic["stall"] += 1

    def empty_cache(self) -> None:
        traffic["empty_cache"] += 1

    def mem_get_info(self, device: Any = 0) -> tuple[int, int]:
        return self.memory, self.memory

    def memory_allocated(self, device: Any = 0) -> int:
        return self.peak

    def max_memory_allocated(self, device: Any = 0) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: Any = 0) -> None:
        self.peak = 0


module = _Module()
_setup_privateuseone_for_python_backend(NAME, backend_module=module)
DEVICE = torch.device(NAME, 0)
torch.__future__.set_swap_module_params_on_conversion(True)  # module.to() swaps parameters, as for any subclass


class SimTensor(torch.Tensor):
    """A tensor on the device; `held` is the tensor of the CPU that holds its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SimTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, storage_offset=inner.storage_offset(),
            device=DEVICE,
        )  # fmt: skip
        made.held = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"sim:{self.held!r}"

    def tolist(self) -> Any:
        traffic["down"] += 1
        return self.held.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert sim:0 device type tensor to numpy; use Tensor.cpu() first")

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, SimTensor):
            raise RuntimeError("incompatible tensor type: .data of a tensor on sim:0 was set to one on the CPU")
        self.held = new.held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        _require_one_device(func, given)
        _count(func, args, kwargs, given)
        device = kwargs.get("device")
        if func is aten.copy_.default:
            stays = isinstance(args[0], SimTensor)
        else:
            stays = device is None or torch.device(device).type == NAME
        own = {id(leaf.held): leaf for leaf in given if isinstance(leaf, SimTensor)}
        on_cpu = kwargs | ({"device": "cpu"} if device is not None else {})
        inner_args, inner_kwargs = tree_map_only(SimTensor, lambda leaf: leaf.held, (args, on_cpu))
        result = _compute(func, inner_args, inner_kwargs)
        if torch.Tag.inplace_view in func.tags:  # the wrapper gets its new shape, too
            with no_dispatch():
                func(*args, **kwargs)
        resized = [leaf for leaf in own.values() if leaf.shape != leaf.held.shape]
        assert not resized, f"{func} resized a tensor, which this device does not follow: add it to _made_on_cpu"

        def outside(leaf: torch.Tensor) -> torch.Tensor:
            if stays:
                return own[id(leaf)] if id(leaf) in own else SimTensor(leaf)
            return leaf.clone() if id(leaf) in own else leaf

        return tree_map_only(torch.Tensor, outside, result)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """On the CPU; a histogram of integers only accelerators have."""
    if func is aten.histc.default and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _require_one_device(func: Any, given: list[torch.Tensor]) -> None:
    if func in _CROSSES | _TAKES_CPU_INDICES:
        return
    if any(leaf.dim() and not isinstance(leaf, SimTensor) for leaf in given):
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found at least two: sim:0, cpu")


def _count(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
    if func is aten.copy_.default:
        ways = tuple(isinstance(one, SimTensor) for one in args[:2])
    elif func is aten._to_copy.default and kwargs.get("device") is not None:
        ways = (torch.device(kwargs["device"]).type == NAME, isinstance(args[0], SimTensor))
    else:
        ways = (True, True)
    if ways == (True, False):
        traffic["up"] += 1
    elif ways == (False, True):
        traffic["down"] += 1
    masks = func in _TAKES_CPU_INDICES and any(leaf.dtype == torch.bool for leaf in given[1:])
    if func in _STALLS or masks or (func in _TAKES_CPU_INDICES and not all(isinstance(x, SimTensor) for x in given)):
        traffic["stall"] += 1


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> SimTensor:  # fmt: skip
    return SimTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> SimTensor:
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    inner = [leaf.held if isinstance(leaf, SimTensor) else leaf for leaf in (source, target)]
    inner[1].copy_(inner[0])
    traffic["up" if isinstance(target, SimTensor) else "down"] += 1
    return target


def _made_on_cpu(name: str) -> Any:
    """A factory that torch would make by resizing an empty tensor, which a wrapper does not follow."""
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")

    def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> SimTensor:
        return SimTensor(function(*args, device=torch.device("cpu"), **kwargs))

    return make


_library = torch.library.Library("aten", "IMPL")
for _name, _function in (
    ("empty.memory_format", _empty),
    ("empty_strided", _empty_strided),
    ("_copy_from", _copy_from),
    *((name, _made_on_cpu(name)) for name in ("arange", "arange.start", "arange.start_step", "randperm", "linspace")),
):
    _library.impl(_name, _function, "PrivateUse1")
