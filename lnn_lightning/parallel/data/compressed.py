"""ZeRO 2 and 3 with compressed gradients: what torch's ``fully_shard`` does with them, in the words of compressors.

In hybrid sharding (replicate x shard) the gradients of a unit are averaged over the ranks that share one copy by a
reduce-scatter as it is, and each rank's pieces then over the ranks that hold the same ones by a compressor, which sees
each piece under its parameter's name: DALL-E's form (Ramesh et al. 2021, arXiv 2102.12092, appendix E). Torch is given
the shard axis alone, and the other average is the hook behind its reduce-scatter. Where there is one axis, the
reduce-scatter itself is compressed, if the way of compression can do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from typing_extensions import override

from lnn_lightning.parallel.data.sharding import Sharding, unreduced
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.reduction import GradientReduction

REPLICATE, SHARD, EXPERT_SHARD = "data_replicate", "data_shard", "expert_shard"
"""Places of compressors."""


def compress_shards(sharding: Sharding, mesh: DeviceMesh, reduction: GradientReduction) -> list[str]:
    """Lets a reduction average the gradients of sharded parameters. Collective over the mesh.

    Args:
        sharding: over the last axis of the mesh.
        mesh: data ranks, or replicate x shard.
        reduction: has the compressors.

    Returns:
        Names of parameters (of experts) whose gradients are averaged without compression: theirs is a reduce-scatter
        alone, and the way of compression cannot do that.

    Raises:
        LayoutError: neither can it for all other parameters.
    """
    hybrid, apart = mesh.ndim > 1, sharding.apart
    main = partial(reduction.over, REPLICATE if hybrid else SHARD, mesh.get_group(0))
    used = [main]
    if not main().can_scatter and not hybrid:
        raise LayoutError(
            "This `gradient_compression` cannot be used with `zero_stage` 2 and 3 over one data axis: each rank would "
            "need buffers for the error of all gradients, whole, which is what ZeRO shares out. Use "
            "`data_parallel_size=(replicate, shard)`, which compresses between the groups that hold one copy each; "
            "`zero_stage=1`; or Quantized(...) or Cast(...), which compress the reduce-scatter."
        )
    of_experts = None
    if apart is not None and apart.mesh.size() > 1 and main().can_scatter:
        of_experts = partial(reduction.over, EXPERT_SHARD, apart.mesh.get_group())
        of_experts()
        used.append(of_experts)
    plain: list[str] = []
    for group in sharding.groups():
        names = [sharding.by_parameter[id(each.sharded_param)].name for each in group.fsdp_params]
        if not sharding.is_apart(names[0]):
            _Compressed(group, names, main, scatters=not hybrid)
        elif of_experts is not None:
            _Compressed(group, names, of_experts, scatters=True)
        else:
            plain += names
    sharding.behind_reduction = partial(_finish, used)
    return plain


def _finish(compressors: Sequence[Callable[[], Any]]) -> None:
    for compressor in compressors:
        compressor().finish_step()


class _Compressed:
    """One of torch's groups of parameters, told to average its gradients by a compressor.

    Args:
        group: torch's.
        names: of its parameters.
        compressor: gives what averages.
        scatters: it does the reduce-scatter; otherwise it averages the pieces that torch's leaves.
    """

    def __init__(self, group: Any, names: Sequence[str], compressor: Callable[[], Any], scatters: bool) -> None:
        self._group, self._unit = group, names[0]
        self._names = {id(each): name for each, name in zip(group.fsdp_params, names, strict=True)}
        self._compressor, self._size = compressor, group.mesh_info.shard_mesh_size
        self._reduced: list[Any] = []
        # torch adds up and divides by nothing, so that compressors get gradients as they are: it would divide by a
        # part of the ranks before the reduction and by the rest behind it in some dtypes
        group.gradient_divide_factor, group.force_sum_reduction_for_comms = 1.0, True
        if scatters:
            group._reduce_scatter_comm = _Scatter(self._scatter)
        else:
            group._all_reduce_hook = self._average
        reduce = group.post_backward
        group.post_backward = partial(self._note, reduce)

    def _note(self, reduce: Any, *args: Any) -> None:
        """Behind the backward of a unit: notes of which parameters torch is about to reduce gradients."""
        self._reduced = [
            each
            for each in self._group.fsdp_params
            if hasattr(each, "_unsharded_param") and (unreduced(each) or each._unsharded_param.requires_grad)
        ]
        reduce(*args)

    def _spans(self, length: int) -> Iterator[tuple[str, int, torch.Size, int]]:
        """Name, first element, padded shape and rows of each parameter's piece in a flat buffer of pieces."""
        start = 0
        for each in self._reduced:
            shape = each.padded_sharded_param_size
            yield self._names[id(each)], start, shape, each.sharded_size[0]
            start += shape.numel()
        assert start == length, "torch has laid out other gradients than expected"

    def _average(self, flat: Tensor) -> None:
        """Makes the sums over a shard group means over all ranks, in place."""
        if flat.device.type != "cpu":
            flat.record_stream(torch.accelerator.current_stream(flat.device))  # torch made it on another one
        flat.div_(self._size)
        pieces = {
            name: flat[start : start + shape.numel()].view(shape)[:rows]
            for name, start, shape, rows in self._spans(flat.numel())
            if rows
        }
        if pieces:
            self._compressor().reduce(pieces)

    def _scatter(self, own: Tensor, flat: Tensor) -> None:
        """Fills this rank's pieces with means over all ranks of a buffer of pieces for each of them."""
        own.copy_(self._compressor().scatter_mean(flat.view(self._size, -1), self._unit))


class _Scatter(ReduceScatter):
    """What torch calls in place of a reduce-scatter."""

    def __init__(self, scatter: Any) -> None:
        self._scatter = scatter

    @override
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._scatter(output_tensor, input_tensor)
