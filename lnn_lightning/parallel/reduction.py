"""Sums over ranks: in which precision gradients are added up, and the mean of a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


def reduction_dtype(own: torch.dtype, chosen: torch.dtype | None) -> torch.dtype:
    """The dtype in which ranks add up gradients.

    Args:
        own: the gradients'.
        chosen: by the user; None: theirs, but fp32 for half precision, whose sums would lose what small terms add.
    """
    if chosen is not None:
        return chosen
    return torch.float32 if own in (torch.float16, torch.bfloat16) else own


def mean_over(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The mean of a value over the ranks of a group, which is left as it is; None: this rank alone. Collective."""
    if group is None:
        return value
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


class BucketReducer(Protocol):
    """Averages a bucket of gradients in its place, in another way than by an all-reduce."""

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The future is of the bucket's buffer."""


class GradientReduction(Protocol):
    """How gradients are averaged over ranks, if not by an all-reduce: `lnn_lightning.communication.Compressors`."""

    def hook(self, place: str, group: dist.ProcessGroup, names: Mapping[int, str]) -> BucketReducer:
        """For the parameters with these names (by identity) over a group, which has a name on this rank."""

    def over(self, place: str, group: dist.ProcessGroup) -> Any:
        """What averages over a group, the same each time."""

    def scaled(self, scale: float) -> None:
        """Before a step: the factor in its gradients (loss scale)."""
