"""Gradients cut by rows among the ranks of a host, as ``fully_shard`` cuts parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Rows:
    """How gradients are cut: dimension 0 in equal parts, the last ones shorter or empty; a scalar is one row.

    Attributes:
        ranks: that share out the rows.
        rank: this one.
    """

    ranks: int
    rank: int

    def pack(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """All of them (of one dtype) in a new tensor (ranks, elements), each rank's rows side by side, padded."""
        parts = []
        for gradient in gradients.values():
            size = self._part(gradient)
            padded = functional.pad(gradient.reshape(-1), (0, self.ranks * size - gradient.numel()))
            parts.append(padded.view(self.ranks, size))
        return torch.cat(parts, dim=1)

    def pieces(self, gradients: Mapping[str, Tensor], own: Tensor) -> dict[str, Tensor]:
        """Views of this rank's line of what was packed, by parameter; those it has no row of are left out."""
        found, start = {}, 0
        for name, gradient in gradients.items():
            shape = self.shape(gradient.shape)
            if prod(shape):
                found[name] = own[start : start + prod(shape)].view(shape)
            start += self._part(gradient)
        return found

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of this rank's piece of a gradient; without elements if it has no row."""
        if not whole:
            return () if self.rank == 0 else (0,)
        rows = -(-whole[0] // self.ranks)
        return (max(0, min(rows, whole[0] - self.rank * rows)), *whole[1:])

    def unpack(self, packed: Tensor, gradients: Mapping[str, Tensor]) -> None:
        """Puts the lines of all ranks in the place of the gradients."""
        start = 0
        for gradient in gradients.values():
            size = self._part(gradient)
            whole = packed[:, start : start + size].reshape(-1)[: gradient.numel()]
            gradient.copy_(whole.view_as(gradient))
            start += size

    def _part(self, gradient: Tensor) -> int:
        """Elements of the first rank's rows."""
        rows = gradient.shape[0] if gradient.dim() else 1
        return -(-rows // self.ranks) * (gradient.numel() // max(rows, 1))
