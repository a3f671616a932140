"""Collectives that count the bytes they are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Bytes of one rank.

    Attributes:
        plain: of the gradients that were reduced, as they are.
        payload: handed to collectives: what an all-reduce, an all-gather or an all-to-all got from this rank.
        sent: what leaves the rank for them where collectives go round a ring (2(n-1)/n of the payload of an all-reduce,
            n-1 times that of an all-gather, (n-1)/n of that of an all-to-all or a reduce-scatter).
    """

    plain: int = 0
    payload: int = 0
    sent: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes of the gradients over those handed to collectives."""
        return self.plain / self.payload if self.payload else float("inf")


class Wire:
    """Collectives over a group, each waited for where the next operation needs its result.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.traffic = Traffic()

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor over the ranks, in place."""
        self._count(tensor, 2 * (self.size - 1) / self.size)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, (ranks, *shape)."""
        self._count(tensor, self.size - 1)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather_single(gathered.view(-1), tensor.contiguous().view(-1), group=self.group)
        return gathered

    def exchange(self, tensor: Tensor) -> Tensor:
        """Row r of a tensor (ranks, ...) goes to rank r; row r of the result came from it."""
        self._count(tensor, (self.size - 1) / self.size)
        tensor = tensor.contiguous()
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=self.group)
        return received

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor (ranks, ...) over the ranks; this rank gets its row."""
        self._count(tensor, (self.size - 1) / self.size)
        tensor = tensor.contiguous()
        own = torch.empty_like(tensor[0])
        dist.reduce_scatter_single(own.view(-1), tensor.view(-1), group=self.group)
        return own

    def _count(self, tensor: Tensor, share: float) -> None:
        size = tensor.numel() * tensor.element_size()
        self.traffic.payload += size
        self.traffic.sent += size * share
