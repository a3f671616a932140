"""Numbers in eight or four bits, with a scale for each block of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override


class Code(ABC):
    """A format; blocks are (blocks, block), in fp32 or fp64."""

    largest: float
    """Number that the largest of a block is mapped to."""

    @abstractmethod
    def pack(self, scaled: Tensor, noise: Tensor | None) -> Tensor:
        """Numbers within plus and minus ``largest``, as bytes (blocks, bytes).

        Args:
            scaled: the numbers.
            noise: uniform in [0, 1), where numbers are rounded by chance; None: to the nearest.
        """

    @abstractmethod
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers (blocks, block)."""

    def encode(self, blocks: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Bytes (blocks, bytes) and scales (blocks, 1); a block that is not finite has such a scale."""
        scales = blocks.abs().amax(1, keepdim=True) / self.largest
        return self.pack(blocks / torch.where(scales > 0, scales, 1), noise), scales

    def decode(self, packed: Tensor, scales: Tensor) -> Tensor:
        """What :meth:`encode` has made of blocks."""
        return self.unpack(packed, scales.dtype) * scales


@dataclass(frozen=True)
class Whole(Code):
    """Signed whole numbers.

    Attributes:
        bits: 8, or 4: two in a byte.
    """

    bits: int

    @property
    def largest(self) -> float:  # type: ignore[override]
        """127 or 7."""
        return float(2 ** (self.bits - 1) - 1)

    @override
    def pack(self, scaled: Tensor, noise: Tensor | None) -> Tensor:
        rounded = scaled.round() if noise is None else (scaled + noise).floor_()
        whole = rounded.clamp_(-self.largest, self.largest).nan_to_num_(0.0).to(torch.int8)
        if self.bits == 8:
            return whole.view(torch.uint8)
        low, high = (whole + 8).view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
        return low | (high << 4)

    @override
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        if self.bits == 8:
            return packed.view(torch.int8).to(dtype)
        return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).to(dtype) - 8


@dataclass(frozen=True)
class Eight(Code):
    """Eight bits of a floating-point number: four of exponent, three of mantissa."""

    largest = 448.0

    @override
    def pack(self, scaled: Tensor, noise: Tensor | None) -> Tensor:
        return scaled.float().clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)

    @override
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        return packed.view(torch.float8_e4m3fn).to(dtype)
