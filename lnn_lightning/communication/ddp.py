"""Compression in torch's own DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lnn_lightning.communication.compression import Compression
from lnn_lightning.communication.running import Compressors

DATA = "data_parallel"


def attach(model: DistributedDataParallel, compression: Compression, seed: int = 0) -> Compressors:
    """Lets a DDP model reduce its gradients by a way of compression. Collective; once, before the first backward.

    Args:
        model: whose gradients are reduced.
        compression: how.
        seed: the same on all ranks.

    Returns:
        What does it, with its state, scale and traffic.
    """
    compressors = Compressors(compression, seed)
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    group = model.process_group if model.process_group is not None else dist.group.WORLD
    assert group is not None
    hook = compressors.hook(DATA, group, names)
    model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return compressors
