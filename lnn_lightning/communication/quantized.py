"""Gradients in eight or four bits (ZeRO++: Wang et al. 2023, arXiv 2306.10209, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from lnn_lightning.communication.blocks import Whole
from lnn_lightning.communication.compression import Compression, Compressor, Ranks
from lnn_lightning.communication.two_steps import CodedMean
from lnn_lightning.parallel.errors import LayoutError


@dataclass(frozen=True)
class Quantized(Compression):
    """Whole numbers of 8 or 4 bits, with a scale for each block; exchanged, averaged, and coded once more.

    Nothing is kept from step to step. Each rank sends 2(n-1)/n of the coded gradient, whatever the number n of ranks;
    two roundings are between a gradient and what arrives. torch's quantization hooks gather from all ranks, and fail
    in torch 2.13.

    Args:
        bits: of a number: 8 or 4.
        block: numbers of a parameter that share a scale (in the precision of the gradients); even. Parameters with
            fewer are averaged as they are.
        stochastic: round up or down by chance, so that the mean over many steps is that of the gradients.

    Raises:
        LayoutError: a value out of its range.
    """

    remembers: ClassVar[bool] = False
    bits: int = 8
    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise LayoutError(f"Quantized's `bits` must be 8 or 4, got {self.bits!r}.")
        if not isinstance(self.block, int) or self.block < 2 or self.block % 2:
            raise LayoutError(f"Quantized's `block` must be an even number of at least 2, got {self.block!r}.")

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return CodedMean(ranks, Whole(self.bits), self.block, self.stochastic)
