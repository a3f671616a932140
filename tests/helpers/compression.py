"""Ways of compression to test strategies with: such as lose nothing, and one that loses much."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.communication import Compression, Compressor
from lnn_lightning.communication.compression import Ranks
from lnn_lightning.parallel.step.randomness import seed_of

CALLS: list[tuple[str, ...]] = []
"""Names of the gradients of each reduction of this process."""


@dataclass(frozen=True)
class Masked(Compression):
    """Each rank sends some elements, drawn by itself, and the rest later; with a density of 1 it loses nothing."""

    density: float = 1.0

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _Masking(ranks, self.density)


class _Masking(Compressor):
    def __init__(self, ranks: Ranks, density: float) -> None:
        super().__init__(ranks)
        self._density = density

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        CALLS.append(tuple(gradients))
        wanted = {name: self.errors.wanted(name, gradient, self.scale) for name, gradient in gradients.items()}
        sent = {name: torch.where(self._mask(name, value), value, 0.0) for name, value in wanted.items()}
        arrived = {name: value.to(gradients[name].dtype, copy=True) for name, value in sent.items()}
        self.average(list(arrived.values()))
        for name, gradient in gradients.items():
            self.errors.keep(name, wanted[name], sent[name], arrived[name], self.scale)
            gradient.copy_(arrived[name])

    def _mask(self, name: str, value: Tensor) -> Tensor:
        seed = seed_of(self.ranks.seed, zlib.crc32(name.encode()), self.step, self.wire.rank)
        drawn = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed))
        return (drawn < self._density) | ~value.isfinite()


@dataclass(frozen=True)
class Scattering(Compression):
    """Loses nothing, and can average into parts."""

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _Scatterer(ranks)


class _Scatterer(Compressor):
    can_scatter = True

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        CALLS.append(tuple(gradients))
        self.average(list(gradients.values()))

    @override
    def _scatter_mean(self, chunks: Tensor, name: str) -> Tensor:
        CALLS.append((name,))
        return self.wire.scatter_sum(chunks / self.wire.size)
