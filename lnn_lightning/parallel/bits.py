"""Truth values in one bit each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Eight bytes of 0 or 1 times _GATHER: byte k ends up as bit k of the highest byte, and nothing is carried.
_GATHER = 0x0102040810204080
# A byte in all eight bytes of an integer, of which byte k keeps bit k.
_SPREAD = 0x0101010101010101
_SELECT = 0x8040201008040201 - (1 << 64)


def to_bits(values: Tensor) -> Tensor:
    """Packs a one-dimensional boolean tensor into bytes."""
    values = F.pad(values, (0, -values.numel() % 8))
    return ((values.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def from_bits(bits: Tensor, count: int) -> Tensor:
    """The first ``count`` values as bytes: zero for false, anything else for true."""
    return ((bits.to(torch.int64) * _SPREAD) & _SELECT).view(torch.uint8)[:count]
