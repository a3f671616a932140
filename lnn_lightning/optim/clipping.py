"""One gradient norm over the mesh, whatever the partition.

Each rank sums over the parameters it holds and counts, then the sums are added along the axes on which ranks hold
different parameters. A parameter that lives on several of these ranks is counted by one of them and scaled by all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.utils import clip_grads_with_norm_

_Item = TypeVar("_Item")
LookedAt = Callable[[Iterable[Tensor]], None]
"""Takes gradients that were looked at and whose memory can be given back, since they lie in a file."""
_AT_A_TIME = 64 * 2**20
"""Bytes of such gradients that are looked at together."""


@torch.no_grad()
def mesh_grad_norm(
    parameters: Iterable[nn.Parameter],
    groups: Sequence[ProcessGroup],
    counted: Callable[[nn.Parameter], bool] | None = None,
    norm_type: float = 2.0,
    looked_at: LookedAt | None = None,
) -> Tensor:
    """The norm of all gradients as one vector. Collective: all ranks of the groups must call, even without gradients.

    Args:
        parameters: parameters of this rank; those without a gradient are passed over.
        groups: process groups along the axes on which ranks hold different parameters.
        counted: whether a parameter counts here; exactly one of the ranks that share it must count it.
        norm_type: order of the norm; ``math.inf`` for the largest absolute value.
        looked_at: called behind every portion of the gradients; None: they are in memory, all at once.

    Returns:
        A scalar in fp32, or in fp64 if a gradient here is.

    Raises:
        ValueError: the order is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"The order of the gradient norm must be positive, got {norm_type}.")
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None and (counted is None or counted(p))]
    device = next((tensor.device for tensor in (*grads, *parameters)), torch.device("cpu"))
    norms = _norms(grads, norm_type, device, looked_at)
    if norm_type == math.inf:
        norm = _reduced_max(norms.max() if norms.numel() else norms.sum(), groups)
    else:
        norm = _reduced(norms.pow(norm_type).sum(), groups, ReduceOp.SUM).pow(1.0 / norm_type)
    double = any(p.grad is not None and p.grad.dtype == torch.float64 for p in parameters)
    return norm.to(device, torch.float64 if double else torch.float32)


def clip_grad_by_mesh_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    groups: Sequence[ProcessGroup],
    counted: Callable[[nn.Parameter], bool] | None = None,
    norm_type: float = 2.0,
    looked_at: LookedAt | None = None,
) -> Tensor:
    """Scales the gradients of this rank as ``torch.nn.utils.clip_grad_norm_`` does, by the norm over the mesh.

    Takes the arguments of :func:`mesh_grad_norm` and is collective like it. Parameters that do not count here are
    scaled too.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: the order of the norm is not positive.
    """
    parameters = list(parameters)
    norm = mesh_grad_norm(parameters, groups, counted, norm_type, looked_at)
    if looked_at is None:
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    by_gradient = [(p.grad, p) for p in parameters if p.grad is not None]
    for some in _portions(by_gradient, lambda pair: pair[0]):
        clip_grads_with_norm_([parameter for _, parameter in some], max_norm, norm)
        looked_at(gradient for gradient, _ in some)
    return norm


def _norms(grads: list[Tensor], norm_type: float, device: torch.device, looked_at: LookedAt | None) -> Tensor:
    """The norm of each gradient in fp64; low precision is accumulated in fp32."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        if values.numel():
            alike.setdefault((values.device, values.dtype), []).append(values)
    norms: list[Tensor] = []
    for (_, dtype), tensors in alike.items():
        for some in [tensors] if looked_at is None else _portions(tensors, lambda tensor: tensor):
            norms.extend(torch._foreach_norm(some, norm_type, dtype=torch.promote_types(dtype, torch.float32)))
            if looked_at is not None:
                looked_at(some)
    if not norms:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([norm.to(device) for norm in norms]).double()


def _portions(items: Sequence[_Item], gradient: Callable[[_Item], Tensor]) -> Iterator[list[_Item]]:
    """In order, so many at a time that their gradients fit into memory."""
    some: list[_Item] = []
    nbytes = 0
    for item in items:
        some.append(item)
        nbytes += gradient(item).numel() * gradient(item).element_size()
        if nbytes >= _AT_A_TIME:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _reduced(value: Tensor, groups: Sequence[ProcessGroup], op: ReduceOp.RedOpType) -> Tensor:
    for group in groups:
        value = value.to(device_of(group, value.device))
        dist.all_reduce(value, op=op, group=group)
    return value


def _reduced_max(value: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    # a maximum may lose a NaN on the way, so it travels beside
    pair = _reduced(torch.stack([value.nan_to_num(0.0, math.inf), value.isnan().double()]), groups, ReduceOp.MAX)
    return torch.where(pair[1] > 0, math.nan, pair[0])


def device_of(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where the group communicates; a rank without parameters cannot tell from them."""
    backend = dist.get_backend(group)
    if backend == "nccl" and device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if backend == "gloo" else device
