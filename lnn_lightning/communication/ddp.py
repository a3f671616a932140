"""Compression in torch's own DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lnn_lightning.communication.compression import Compression
from lnn_lightning.communication.running import Compressors
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.layout import DATA


def attach(model: DistributedDataParallel, compression: Compression, seed: int = 0) -> Compressors:
    """Lets a DDP model reduce its gradients by a way of compression. Collective; once, before the first backward.

    Args:
        model: whose gradients are reduced.
        compression: how.
        seed: the same on all ranks.

    Returns:
        What does it, with its state, scale and traffic.

    Raises:
        LayoutError: a module has sparse or complex gradients.
    """
    refuse_gradients(model.module, compression)
    compressors = Compressors(compression, seed)
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    group = model.process_group if model.process_group is not None else dist.group.WORLD
    assert group is not None
    hook = compressors.hook(DATA, group, names)
    model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    return compressors


def refuse_gradients(root: nn.Module, compression: Compression) -> None:
    """Hooks get dense gradients of real numbers.

    Raises:
        LayoutError: a module has sparse or complex ones.
    """
    for name, parameter in root.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise LayoutError(
                f"{name!r} is complex: {type(compression).__name__} compresses gradients of real numbers alone. Keep "
                "it as real numbers (`torch.view_as_real`) and use `torch.view_as_complex` in forward, or leave the "
                "compression out."
            )
    for name, module in root.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise LayoutError(
                f"{name!r} is an embedding with `sparse=True`: {type(compression).__name__} compresses dense gradients "
                "alone. Leave `sparse=True` out, or the compression."
            )
