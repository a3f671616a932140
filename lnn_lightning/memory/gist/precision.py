"""Delayed precision reduction: activations are kept in fewer bits once the forward has used them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lnn_lightning.memory.saved_tensors import Encoded, Saved

_STORED = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}


class PrecisionEncoder:
    """Keeps activations in fp16 or fp8.

    Values are divided by a scale a tensor, so that the largest is representable: in fp16 only if it is not anyway, in
    fp8 always. Only what is part of the graph is encoded: neither the data a step begins with nor statistics that an
    operation saves for itself.

    Args:
        precision: ``"fp16"`` or ``"fp8"``.
    """

    def __init__(self, precision: str) -> None:
        self._name, self._dtype = precision, _STORED[precision]

    def encode(self, tensor: Tensor, saved: Saved) -> Encoded | None:
        """See :class:`lnn_lightning.memory.saved_tensors.Encoder`."""
        if not saved.requires_grad or not tensor.is_floating_point() or tensor.element_size() <= self._dtype.itemsize:
            return None
        smallest, largest = torch.aminmax(tensor)
        scale = torch.maximum(-smallest, largest) / torch.finfo(self._dtype).max
        scale = scale.clamp_min(1.0 if self._dtype is torch.float16 else torch.finfo(tensor.dtype).tiny)
        return Encoded(self._name, [(tensor / scale).to(self._dtype), scale], partial(_decode, dtype=tensor.dtype))


def _decode(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    stored, scale = tensors
    if stored.dtype is torch.float16:
        return stored.to(dtype).mul_(scale)
    # by a table: the cast from eight bits is slow on CPUs
    every = torch.arange(256, dtype=torch.uint8, device=stored.device).view(stored.dtype).to(dtype) * scale
    return every.index_select(0, stored.view(torch.uint8).to(torch.int32))
