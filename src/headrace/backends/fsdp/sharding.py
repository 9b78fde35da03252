"""FSDP2 around a model: parameters, gradients and optimizer state in shards, sums instead of means between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

T = TypeVar("T")


class Root(nn.Module):
    """Holds all that is trained. Parameters are complete only inside of it: `root(function)` calls a function there.

    Modules of a transformers model are called one by one (the decoder, then the head, chunk after chunk), so no one
    module's own forward covers them.
    """

    def __init__(self, modules: nn.Module) -> None:
        super().__init__()
        self.inside = modules

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def new_mesh(device: torch.device, size: int, shard: int, split: int = 1) -> DeviceMesh:
    """Ranks in groups of `shard` that each hold the complete model between them (0: all do; several groups: HSDP).

    Within a group, `split` neighbours split every layer.
    """
    if size == 1 and not dist.is_initialized():  # one rank has met nobody, and a mesh wants a group, if only of one
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    shard = shard or size
    axes = {"replicate": size // shard, "shard": shard // split, "split": split}
    kept = {name: ranks for name, ranks in axes.items() if ranks > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def sharding_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Those along which ranks have different rows."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "split")
    return mesh[names]


def shard_modules(
    root: Root, layers: Sequence[nn.Module], mesh: DeviceMesh, forward: torch.dtype, offload: bool
) -> None:
    """Shard every layer by itself, and what is left with the root. The forward computes in its dtype, sums in a wider
    one; the parameters that the optimizer updates keep theirs."""
    held = next(root.parameters()).dtype
    reduced = torch.promote_types(forward, torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=forward if forward != held else None, reduce_dtype=reduced if forward != reduced else None,
        cast_forward_inputs=False,
    )  # fmt: skip
    given: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **given)
    fully_shard(root, **given)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum that multiplies


def as_fsdp(root: nn.Module) -> FSDPModule:
    """The root, as what `fully_shard` has made of it."""
    assert isinstance(root, FSDPModule)
    return root


def decoder_layers(hf_model: Any) -> list[nn.Module]:
    """The blocks that a transformers model repeats, by the names that it declares; else its longest list of modules."""
    base = hf_model.get_base_model() if hasattr(hf_model, "peft_config") else hf_model
    declared = set(getattr(base, "_no_split_modules", None) or ())
    found = [module for module in base.modules() if type(module).__name__ in declared]
    if found:
        return found
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=nn.ModuleList()))


def full(tensor: Tensor) -> Tensor:
    """A sharded tensor, complete: a collective. Others as they are."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
