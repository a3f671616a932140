"""What data ranks must do equally often though their batches differ in size."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist


def common_size(size: int | None, group: dist.ProcessGroup, device: torch.device) -> int | None:
    """Greatest common divisor of the batch sizes of all ranks: what divides it, divides every batch. Collective.

    Args:
        size: of this rank's batch; None: it has none.
        group: the ranks.
        device: where they communicate.
    """
    own = torch.tensor([size or 0], device=device)
    sizes = own.new_empty(dist.get_world_size(group))
    dist.all_gather_single(sizes, own, group=group)
    return math.gcd(*sizes.tolist()) or None
