"""Gradients in a smaller floating-point format on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.communication.blocks import Eight
from lnn_lightning.communication.compression import Compression, Compressor, Ranks
from lnn_lightning.communication.grouping import put_back
from lnn_lightning.communication.two_steps import CodedMean
from lnn_lightning.parallel.errors import LayoutError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FP8, _BLOCK = "fp8", 256


@dataclass(frozen=True)
class Cast(Compression):
    """Gradients in a smaller floating-point format.

    bf16 and fp16 are added up on the wire; each rank divides by the number of ranks before it rounds, so the sum does
    not overflow before a mean would. fp16 has no number below 6e-8: without a loss scale small gradients vanish.
    torch's ``fp16_compress_hook`` computes the same; its ``bf16_compress_hook`` refuses gloo. fp8 (four bits of
    exponent) cannot be added up on the wire: it travels as :class:`~lnn_lightning.communication.Quantized` does, with
    a scale for each 256 numbers.

    Args:
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp8"``.

    Raises:
        LayoutError: another dtype.
    """

    remembers: ClassVar[bool] = False
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in (*_DTYPES, _FP8):
            raise LayoutError(f"Cast's `dtype` must be one of {', '.join((*_DTYPES, _FP8))}, got {self.dtype!r}.")

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        if self.dtype == _FP8:
            return CodedMean(ranks, Eight(), _BLOCK)
        return _Caster(ranks, _DTYPES[self.dtype])


class _Caster(Compressor):
    can_scatter = True

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        super().__init__(ranks)
        self._dtype = dtype

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        flat = torch.cat([each.reshape(-1).div(self.wire.size).to(self._dtype) for each in gradients.values()])
        put_back(self.wire.sum(flat), gradients.values())

    @override
    def _scatter_mean(self, chunks: Tensor, name: str) -> Tensor:
        return self.wire.scatter_sum(chunks.div(self.wire.size).to(self._dtype)).to(chunks.dtype)
