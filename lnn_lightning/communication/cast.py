"""Gradients in a smaller floating-point format on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.communication.compression import Compression, Compressor, Ranks
from lnn_lightning.parallel.errors import LayoutError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Compression):
    """Gradients are added up in half precision.

    Each rank divides by the number of ranks before it rounds, so the sum does not overflow before a mean would.

    Args:
        dtype: ``"bf16"`` or ``"fp16"``.

    Raises:
        LayoutError: another dtype.
    """

    remembers: ClassVar[bool] = False
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise LayoutError(f"Cast's `dtype` must be one of {', '.join(_DTYPES)}, got {self.dtype!r}.")

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _Caster(ranks, _DTYPES[self.dtype])


class _Caster(Compressor):
    can_scatter = True

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        super().__init__(ranks)
        self._dtype = dtype

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        flat = torch.cat([each.reshape(-1).div(self.wire.size).to(self._dtype) for each in gradients.values()])
        parts = self.wire.sum(flat).split([each.numel() for each in gradients.values()])
        for gradient, part in zip(gradients.values(), parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    @override
    def _scatter_mean(self, chunks: Tensor, name: str) -> Tensor:
        return self.wire.scatter_sum(chunks.div(self.wire.size).to(self._dtype)).to(chunks.dtype)
