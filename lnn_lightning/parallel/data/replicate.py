"""Data parallelism of a stage: torch's DistributedDataParallel reduces its gradients once a step.

The stage's forward is not a module's forward, so DDP's reducer is driven by hand: either it is armed before the last
backward of the step, so that reducing overlaps with it, or, where other stages wait for that backward or gradients were
not made by ``backward`` (zero bubble), it is flushed behind the schedule by a backward that adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from lnn_lightning.parallel.data.unused import Unused
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.reduction import BucketReducer, reduction_dtype


class Replica:
    """Averages gradients of the given parameters over the data-parallel ranks.

    Args:
        parameters: trainable parameters, the same on all ranks of the group in the same order.
        group: data-parallel ranks that hold the same stage.
        overlap: the reduction may be armed before the last backward; costs a walk through the graph for unused
            parameters.
        reduce_dtype: in which gradients are added up; None: see :func:`reduction_dtype`.
        reduction: averages a bucket in place of the all-reduce.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        overlap: bool,
        reduce_dtype: torch.dtype | None = None,
        reduction: BucketReducer | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self._ddp = DistributedDataParallel(
            _Holder(self.parameters),
            process_group=group,
            find_unused_parameters=overlap,
            init_sync=False,
        )
        self._group, self._reduce_dtype = group, reduce_dtype
        reduce: Callable[[dist.GradBucket], torch.futures.Future[torch.Tensor]] = reduction or self._reduce
        if reduction is not None or any(reduction_dtype(p.dtype, reduce_dtype) != p.dtype for p in self.parameters):
            # torch checks the annotations of a hook, and takes none for right
            self._ddp.register_comm_hook(None, lambda _, bucket: reduce(bucket))
        self._armed = False

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of a bucket over the ranks, added up in the dtype of the reduction."""
        buffer = bucket.buffer()
        sent = buffer.to(reduction_dtype(buffer.dtype, self._reduce_dtype)).div_(dist.get_world_size(self._group))
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        return work.get_future().then(lambda future: buffer.copy_(future.value()[0]))

    def begin(self) -> None:
        """Once before the first forward of a step that ends with a reduction."""
        self._ddp.reducer.prepare_for_forward()
        self._ddp.reducer._rebuild_buckets()

    def arm(self, outputs: Any) -> None:
        """Before the step's last backward: what it adds to is reduced as it gets ready."""
        self._ddp.reducer.prepare_for_backward(list(_find_tensors(outputs)))
        self._armed = True

    def finish(self) -> None:
        """Behind the step's last backward; reduces now unless that was armed."""
        if self._armed:
            self._armed = False
            return
        unused = Unused(self.parameters, self._group)
        views = [parameter.view_as(parameter) for parameter in self.parameters]
        nothing = [view.new_zeros(()).expand_as(view) for view in views]
        self._ddp.reducer.prepare_for_backward(views)
        torch.autograd.backward(views, nothing)
        unused.drop()


def refuse_renormalised(root: nn.Module) -> None:
    """An embedding with ``max_norm`` changes the rows it looks up, which are others on each data rank.

    Raises:
        StepError: there is one.
    """
    for name, module in root.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise StepError(
                f"{name!r} is an embedding with `max_norm`: each data rank would renormalise the rows of its own "
                "samples alone, and the ranks would no longer hold the same table. Leave `max_norm` out, or use "
                "`data_parallel_size=1`."
            )


class _Holder(nn.Module):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(str(index), parameter)
