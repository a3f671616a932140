"""The expert ranks as a block sees them: who holds which experts, and how tokens and gradients cross."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lnn_lightning.parallel.tensor.axis import TensorAxis


@dataclass(frozen=True, eq=False)
class ExpertAxis:
    """Ranks that share out the experts of a block; each brings tokens of its own.

    Attributes:
        size: number of expert ranks.
        rank: this rank's place.
        group: the ranks; None: there is one.
        scale: what gradients within the experts are multiplied by. Every data rank's loss is the mean over its own
            tokens; an expert's gradient is added up over all tokens that reach it, and then averaged over the ranks
            that hold the same expert. With a scale of (those ranks) / (data ranks) that is the mean over all data.
        tensor: tensor ranks, which bring the same tokens; None: there is one.
        divides_experts: each tensor rank has a part of every expert; otherwise tensor ranks share out the tokens.
        hosts: for exchanges in two steps: the group of this host's ranks and that of the ranks at this one's place on
            the other hosts; None: one step.
        same: the ranks that hold the same experts as this one; None: it is the only one.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    scale: float = 1.0
    tensor: TensorAxis | None = None
    divides_experts: bool = False
    hosts: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    same: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertAxis:
        return self

    def span(self, experts: int, rank: int | None = None) -> range:
        """The experts that a rank holds (this one, if none is named): consecutive ones, the first ranks one more."""
        rank = self.rank if rank is None else rank
        each, more = divmod(experts, self.size)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def counts(self, experts: int) -> list[int]:
        """How many of the experts each rank holds."""
        return [len(self.span(experts, rank)) for rank in range(self.size)]
