"""Pieces of tensors that are sharded by their first dimension over data ranks.

The module's own parameters are DTensors (torch's ``fully_shard`` makes them); whoever computes with them (optimizers,
clipping) gets plain tensors that share their memory. The first dimension need not divide: the last ranks then hold
less, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Apart:
    """Parameters of which other ranks hold the same than of the rest: experts that are spread over ranks.

    Attributes:
        sizes: elements of each by its first name, as all ranks together have it.
        mesh: ranks that hold the same as this one.
    """

    sizes: Mapping[str, int]
    mesh: DeviceMesh


def is_sharded(tensor: object) -> bool:
    """Whether data ranks hold different pieces of this parameter."""
    return isinstance(tensor, DTensor)


def leaves_of(module: nn.Module) -> list[Tensor]:
    """What gradients of a module's parameters are made for: whole ones in place of pieces, once they were gathered."""
    inside = set(module.modules())
    leaves: list[Tensor] = [parameter for parameter in module.parameters() if not is_sharded(parameter)]
    for each in (each for each in inside if isinstance(each, FSDPModule)):
        for group in each._get_fsdp_state()._fsdp_param_groups:
            own = [parameter for parameter in group.fsdp_params if parameter._module_info.module in inside]
            leaves += [parameter._unsharded_param for parameter in own if hasattr(parameter, "_unsharded_param")]
    return [*{id(leaf): leaf for leaf in leaves}.values()]


def local_of(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory; a tensor that is not sharded itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def span_of(length: int, rank: int, size: int) -> tuple[int, int]:
    """First index and count of the rows of ``rank`` when ``length`` rows are dealt to ``size`` ranks, as in chunk()."""
    each = -(-length // size)
    start = min(rank * each, length)
    return start, min(each, length - start)


def piece_of(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of ``whole`` (shape of ``like``) that this rank holds of ``like``; all, if that is not sharded."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    start, count = span_of(whole.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    return whole[start : start + count]


def sharded_like(piece: Tensor, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """The DTensor whose piece on this rank is ``piece``, sharded as ``like`` is; of its shape, or another."""
    assert isinstance(like, DTensor)
    whole = like if shape is None else torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(
        piece, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@torch.no_grad()
def whole_of(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """A sharded tensor put together on every rank; others as they are. Collective over the ranks that share it.

    Args:
        tensor: a sharded tensor, or any other.
        device: where the ranks communicate; None: where the tensor is.

    Returns:
        A contiguous tensor of the whole shape on ``device``.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device).contiguous()
    mesh = tensor.device_mesh
    size = mesh.size(mesh.ndim - 1)
    piece = tensor._local_tensor.detach().to(device)
    _, rows = span_of(tensor.shape[0], 0, size)
    padded = piece.new_zeros((rows, *tensor.shape[1:]))
    padded[: piece.shape[0]].copy_(piece)
    whole = piece.new_empty((rows * size, *tensor.shape[1:]))
    dist.all_gather_single(whole, padded, group=mesh.get_group(mesh.ndim - 1))
    return whole[: tensor.shape[0]].contiguous()
