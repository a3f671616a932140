"""What a precision plugin must know of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lnn_lightning.optim.clipping import LookedAt


def _always(parameter: nn.Parameter) -> bool:
    return True


@dataclass(frozen=True)
class MeshAgreement:
    """Whom the ranks ask before they clip gradients or skip a step; by default nobody, as on one process.

    Attributes:
        groups: process groups over which gradient norms are summed and overflows are agreed on.
        counted: whether a parameter counts in the norm here; one of the ranks that share it counts it.
        device: where a rank without gradients communicates.
        looked_at: takes gradients that were looked at, where they lie in a file; None: they are in memory.
        with_own_gradients: process groups besides, whose ranks have gradients and norms of their own, and skip a step
            together.
    """

    groups: tuple[ProcessGroup, ...] = ()
    counted: Callable[[nn.Parameter], bool] = _always
    device: torch.device = torch.device("cpu")
    looked_at: LookedAt | None = None
    with_own_gradients: tuple[ProcessGroup, ...] = ()
