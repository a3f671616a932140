"""How the experts of all blocks of a module were loaded, over all ranks: one sum of a few numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.parallel.expert.account import Account, Tally

if TYPE_CHECKING:
    from lnn_lightning.parallel.expert.install import ExpertSharding


def block_loads(account: Account | None, sharding: ExpertSharding | None) -> tuple[dict[str, Tally], int]:
    """Loads of all blocks on this rank since the last reading, the same blocks on all ranks; micro-batches since.

    A block that lives on another stage of the pipeline has a load of zeros.
    """
    found: dict[str, Tally] = {}
    parts = 0
    if account is not None:
        tallies, parts = account.read()
        for name, layer in account.layers.items():
            found[name] = tallies.get(name) or _nothing(len(layer.experts))
    if sharding is not None:
        loads = sharding.loads()
        for seam in sharding.seams:
            if not seam.layer:
                found[seam.name] = _nothing(seam.experts)
                if seam.name in loads:
                    load, dropped = loads[seam.name]
                    found[seam.name] = Tally(load, dropped, load.sum(), torch.zeros(()))
    return found, parts


def _nothing(experts: int) -> Tally:
    zero = torch.zeros(())
    return Tally(torch.zeros(experts), zero, zero, zero)


def summed_loads(loads: dict[str, Tally], device: torch.device) -> dict[str, Tally]:
    """The sum over all ranks. Collective over them."""
    parts = [
        torch.cat([each.load.to(device).double(), *(value.to(device).double().view(1) for value in _scalars(each))])
        for each in loads.values()
    ]
    total = torch.cat(parts)
    if dist.is_initialized():
        dist.all_reduce(total)
    total = total.cpu()
    summed = {}
    for name, part in zip(loads, total.split([len(part) for part in parts]), strict=True):
        summed[name] = Tally(part[:-3], *part[-3:].unbind())
    return summed


def _scalars(tally: Tally) -> tuple[Tensor, Tensor, Tensor]:
    return tally.dropped, tally.asked, tally.loss
