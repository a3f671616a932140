"""Parameters of which a rank holds a part: how the part lies in the whole.

Optimizers that look at whole parameters (their norms, the means of their rows) are right on parts if they know this.
One that does is let through where others are refused; the strategy tells it about its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lnn_lightning.optim.clipping import device_of


@dataclass(frozen=True, eq=False)
class Cut:
    """How what a rank holds of a parameter lies in the whole.

    Attributes:
        whole: shape of the whole.
        real: what of the part is of the whole, by dimension: its first elements; what follows is padding.
        groups: process groups whose ranks divide the whole, with the dimension that they divide; each group once.
    """

    whole: tuple[int, ...]
    real: tuple[int, ...]
    groups: tuple[tuple[ProcessGroup, int], ...]

    def across(self, *dims: int) -> tuple[ProcessGroup, ...]:
        """Groups over which a sum along these dimensions (all, if none is named) is added up."""
        return tuple(group for group, dim in self.groups if not dims or dim in dims)


Describe = Callable[[Tensor], Cut | None]
"""How a parameter of an optimizer's group is cut; None: it is whole here."""


@runtime_checkable
class KnowsCuts(Protocol):
    """An optimizer that is right on parts of parameters. Its groups have empty parts too: all ranks must take part."""

    def bind_cuts(self, describe: Describe, groups: Sequence[ProcessGroup]) -> None:
        """Tells it how its parameters are cut.

        Args:
            describe: is asked about any parameter of its groups, before each step.
            groups: all that may divide a parameter, in the order in which every rank communicates.
        """

    def reduced_dims(self, leaf: str, ndim: int) -> tuple[int, ...]:
        """Along which dimensions of a parameter a leaf of its state is a statistic: it has one element there."""


def reduced_dims(optimizer: object, leaf: str, ndim: int) -> tuple[int, ...]:
    """As :meth:`KnowsCuts.reduced_dims`; none for any other optimizer."""
    return optimizer.reduced_dims(leaf, ndim) if isinstance(optimizer, KnowsCuts) else ()


def add_up(sums: Iterable[tuple[Tensor, Sequence[ProcessGroup]]], order: Sequence[ProcessGroup]) -> None:
    """Adds up tensors over ranks, in place: one all-reduce a group and dtype, however many there are.

    Args:
        sums: what this rank has, with the groups over which it is added up; for each group the same on all its ranks.
        order: of the groups.
    """
    sums = list(sums)
    for group in order:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value, groups in sums:
            if any(each is group for each in groups):
                by_dtype.setdefault(value.dtype, []).append(value)
        for values in by_dtype.values():
            device = device_of(group, values[0].device)
            total = torch.cat([value.reshape(-1).to(device) for value in values])
            dist.all_reduce(total, group=group)
            for value, part in zip(values, total.split([value.numel() for value in values]), strict=True):
                value.copy_(part.view(value.shape))
