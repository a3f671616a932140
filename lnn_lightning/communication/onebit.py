"""Signs of gradients: one bit an element with error feedback, or votes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lnn_lightning.communication.compression import Compression, Compressor, Ranks, Seat
from lnn_lightning.communication.grouping import by_dtype, put_back, working_dtype
from lnn_lightning.communication.settings import is_number
from lnn_lightning.parallel.bits import from_bits, to_bits
from lnn_lightning.parallel.errors import LayoutError


@dataclass(frozen=True)
class OneBit(Compression):
    """One bit an element: sign(p) mean|p| for each parameter, of p = gradient + what was not sent yet.

    EF-SignSGD (algorithm 1 of Karimireddy et al. 2019, arXiv 1901.09847, with a scale for each parameter); 1-bit SGD
    (Seide et al. 2014) is the same with one scale for each sign. What arrives is the mean over the ranks of what each
    has sent. Signs are gathered, so a rank sends ranks-1 times its bits: for many ranks use it between hosts alone
    (:class:`~lnn_lightning.communication.Hierarchical`).

    Args:
        error_feedback: False: what was not sent is lost, and training may not converge.
        start_step: first step that is compressed; gradients of those before are averaged exactly.

    Raises:
        LayoutError: a value out of its range.
    """

    error_feedback: bool = True
    start_step: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.start_step, whole=True) or self.start_step < 0:
            raise LayoutError(f"OneBit's `start_step` must be a whole number of at least 0, got {self.start_step!r}.")

    @override
    def state_bytes(self, shape: Sequence[int], dtype: torch.dtype, seat: Seat) -> int:
        return math.prod(shape) * working_dtype(dtype).itemsize if self.error_feedback else 0

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _Signs(ranks, self)


class _Signs(Compressor):
    def __init__(self, ranks: Ranks, settings: OneBit) -> None:
        super().__init__(ranks)
        self._settings = settings

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        if self.step < self._settings.start_step:
            self.average(list(gradients.values()))
            return
        for dtype, members in by_dtype(gradients).items():
            self._compress(members, dtype)

    def _compress(self, gradients: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Two collectives: the bits and the scales of a bucket."""
        wanted = [self._wanted(name, gradient, dtype) for name, gradient in gradients.items()]
        sizes = [each.numel() for each in wanted]
        own = torch.stack([each.abs().mean() for each in wanted])
        signs = torch.cat([each.view(-1) >= 0 for each in wanted])
        bits, scales = self.wire.gather(to_bits(signs)), self.wire.gather(own)
        arrived = [torch.zeros_like(each) for each in wanted]
        for rank in range(self.wire.size):
            of_rank = from_bits(bits[rank], sum(sizes)).bool().split(sizes)
            for total, positive, scale in zip(arrived, of_rank, scales[rank] / self.wire.size, strict=True):
                total.view(-1).add_(torch.where(positive, scale, -scale))
        for name, want, scale, result in zip(gradients, wanted, own, arrived, strict=True):
            if self._settings.error_feedback:
                self.errors.keep(name, want, torch.where(want >= 0, scale, -scale), result, self.scale)
            gradients[name].copy_(result)

    def _wanted(self, name: str, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._settings.error_feedback:
            return gradient.to(dtype).contiguous()
        return self.errors.wanted(name, gradient, self.scale).contiguous()


@dataclass(frozen=True)
class SignSGD(Compression):
    """Ranks vote on the sign of each element (signSGD with majority vote: Bernstein et al. 2018, arXiv 1810.05291).

    What arrives is -1, 0 or 1 and says nothing of the size of a gradient: it is for optimizers that do not ask, such as
    SGD with a small learning rate (1e-4), and clipping by a norm is of no use. A gradient of exactly zero (a row of an
    embedding that no sample has) votes for neither side, and a tie is zero: with one bit, as in the paper, such
    elements would move for ever. So a vote has two bits, sent to the rank that counts it, and two come back.
    """

    remembers: ClassVar[bool] = False

    @override
    def compressor(self, ranks: Ranks) -> Compressor:
        return _Votes(ranks)


class _Votes(Compressor):
    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Two collectives: votes to those who count them, and results."""
        flat = torch.cat([each.reshape(-1) for each in gradients.values()])
        # both bits: not finite, so that this arrives too
        bad = ~flat.isfinite()
        votes = F.pad(torch.stack([(flat > 0) | bad, (flat < 0) | bad]), (0, -len(flat) % (8 * self.wire.size)))
        mine = votes.unflatten(1, (self.wire.size, -1)).transpose(0, 1)  # (ranks, 2, elements)
        share = mine.shape[2]
        cast = self.wire.exchange(to_bits(mine.reshape(-1)).view(self.wire.size, -1))
        of_ranks = from_bits(cast.view(-1), votes.numel()).bool().view(self.wire.size, 2, share)
        spoilt = of_ranks.all(1).any(0)
        count = of_ranks[:, 0].sum(0) - of_ranks[:, 1].sum(0)
        outcome = torch.stack([(count > 0) | spoilt, (count < 0) | spoilt])
        all_bits = self.wire.gather(to_bits(outcome.view(-1)))
        up, down = from_bits(all_bits.view(-1), votes.numel()).bool().view(self.wire.size, 2, share).unbind(1)
        signs = (up.to(flat.dtype) - down.to(flat.dtype)).masked_fill_(up & down, torch.nan).view(-1)[: len(flat)]
        put_back(signs.mul_(self.scale), gradients.values())
