"""Where a parameter's elements and those of its optimizer state lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lnn_lightning.memory.offload.store import Region, Store

SMALL = 1 << 14
"""Elements; state of parameters with fewer stays in memory: it would fill less than some pages of a file."""


@dataclass(frozen=True)
class Leaf:
    """A tensor of optimizer state in a store.

    Attributes:
        region: where.
        shape: its shape.
        stride: how its elements are laid out there.
    """

    region: Region
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self, store: Store) -> Tensor:
        """It, as its optimizer would have it."""
        return store.tensor(self.region).as_strided(self.shape, self.stride)


@dataclass
class Home:
    """What a store has of one parameter.

    Attributes:
        parameter: the parameter.
        leaves: tensors of its optimizer state by name.
        made: the leaves have values; otherwise there is only room for them.
        values: its own values, if they are kept there too.
        updated: called with the place of a part and its new values, whenever a part is updated.
    """

    parameter: Tensor
    leaves: dict[str, Leaf] = field(default_factory=dict)
    made: bool = False
    values: Leaf | None = None
    updated: Callable[[int, int, Tensor], None] | None = None


def in_order_of(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor's elements in the order in which those of another of its shape lie in memory."""
    if tensor.stride() != like.stride():
        made = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = made.copy_(tensor)
    return flat(tensor)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, sharing it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def part_of(elements: Tensor, dims: int) -> Tensor:
    """A part of a flat tensor, with as many dimensions as the whole has: some optimizers treat vectors differently."""
    return elements.view(-1, *(1,) * (dims - 1)) if dims > 1 else elements
