"""An all-reduce of numbers that cannot be added up on the wire (ZeRO++: Wang et al. 2023, arXiv 2306.10209).

Each rank sends every other its part of the coded gradient (all-to-all), adds up the decoded parts it gets, and sends
their mean to all, coded again (all-gather): twice the bytes of the code, and two roundings for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lnn_lightning.communication.blocks import Code
from lnn_lightning.communication.compression import Compressor, Ranks
from lnn_lightning.communication.grouping import by_dtype, working_dtype
from lnn_lightning.parallel.step.randomness import seed_of

_OWN, _MEAN = 0, 1


class CodedMean(Compressor):
    """Averages blocks of coded numbers. Each parameter has blocks of its own, so results do not depend on buckets.

    A parameter that does not fill one block would get larger, and is averaged as it is.

    Args:
        ranks: over whom.
        code: of the numbers.
        block: numbers that share a scale.
        stochastic: numbers are rounded up or down by chance, so that on average nothing is lost.
    """

    can_scatter = True

    def __init__(self, ranks: Ranks, code: Code, block: int, stochastic: bool = False) -> None:
        super().__init__(ranks)
        self._code, self._block, self._stochastic = code, block, stochastic

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        self.average([each for each in gradients.values() if each.numel() < self._block])
        coded = {name: each for name, each in gradients.items() if each.numel() >= self._block}
        for dtype, members in by_dtype(coded).items():
            self._average(members, dtype)

    def _average(self, gradients: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        size = self.wire.size
        parts = [self._in_blocks(gradient.reshape(-1).to(dtype)) for gradient in gradients.values()]
        counts = dict(zip(gradients, map(len, parts), strict=True))
        blocks = torch.cat(parts)
        missing = -len(blocks) % size
        blocks = F.pad(blocks, (0, 0, 0, missing))
        noise = self._noise(counts, missing, blocks, _OWN, self.wire.rank)
        mean = self._mean(blocks, noise)
        noise = self._noise(counts, missing, blocks, _MEAN, 0)
        if noise is not None:
            noise = noise.view(size, -1, self._block)[self.wire.rank]
        packed, scales = self._code.encode(mean, noise)
        everyones = self._code.decode(self.wire.gather(packed).flatten(0, 1), self.wire.gather(scales).flatten(0, 1))
        for gradient, part in zip(gradients.values(), everyones.split([*counts.values(), missing]), strict=False):
            gradient.copy_(part.view(-1)[: gradient.numel()].view_as(gradient))

    def _mean(self, blocks: Tensor, noise: Tensor | None) -> Tensor:
        """The mean over the ranks of this rank's share of the blocks (an n-th of them, in order)."""
        size = self.wire.size
        packed, scales = (self.wire.exchange(each.view(size, -1)) for each in self._code.encode(blocks, noise))
        arrived = self._code.decode(packed.view(len(blocks), -1), scales.view(len(blocks), 1))
        return arrived.view(size, -1, self._block).mean(0)

    @override
    def _scatter_mean(self, chunks: Tensor, name: str) -> Tensor:
        dtype = working_dtype(chunks.dtype)
        blocks = torch.cat([self._in_blocks(chunk.to(dtype)) for chunk in chunks])
        noise = self._noise({name: len(blocks)}, 0, blocks, _OWN, self.wire.rank)
        return self._mean(blocks, noise).view(-1)[: chunks.shape[1]].to(chunks.dtype)

    def _in_blocks(self, flat: Tensor) -> Tensor:
        return F.pad(flat, (0, -flat.numel() % self._block)).view(-1, self._block)

    def _noise(self, counts: Mapping[str, int], missing: int, blocks: Tensor, phase: int, rank: int) -> Tensor | None:
        """Uniform numbers for each block, of a parameter the same in whatever bucket it comes."""
        if not self._stochastic:
            return None
        parts = []
        for name, count in counts.items():
            seed = seed_of(self.ranks.seed, self.step, phase, rank, *name.encode())
            generator = torch.Generator(blocks.device).manual_seed(seed)
            drawn = torch.rand(count, self._block, generator=generator, dtype=blocks.dtype, device=blocks.device)
            parts.append(drawn)
        return F.pad(torch.cat(parts), (0, 0, 0, missing))
