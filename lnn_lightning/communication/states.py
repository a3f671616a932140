"""The state of all ranks' compressors in one file: gathered for it, and taken out of it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.communication.running import Compressors

State = Mapping[str, Mapping[str, Any]]
"""Of one rank's compressors, by place."""


def gathered(state: State, group: dist.ProcessGroup, device: torch.device) -> list[State] | None:
    """The state of every rank, on the first rank of a group in host memory; None on the others. Collective.

    Tensors go one by one, so that no device holds more than one that is not its own.

    Args:
        state: this rank's.
        group: the ranks.
        device: from where they communicate.
    """
    rank, size, first = dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)
    forms: list[Any] = [None] * size
    dist.gather_object(_mapped(state, lambda value: value.to("meta")), forms if rank == 0 else None, first, group)
    if rank > 0:
        _mapped(state, lambda value: _send(value.to(device), first, group))
        return None
    states = [_mapped(state, lambda value: value.detach().to("cpu", copy=True))]
    for source in range(1, size):
        sender = dist.get_global_rank(group, source)
        states.append(_mapped(forms[source], lambda form, rank=sender: _receive(form, rank, group, device)))  # type: ignore[misc]
    return states


def _mapped(state: State, change: Callable[[Tensor], Any]) -> State:
    return {
        place: {key: change(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for place, values in state.items()
    }


def _send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.send(tensor.detach().contiguous().view(-1).view(torch.uint8), to, group)


def _receive(form: Tensor, sender: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    received = torch.empty(form.shape, dtype=form.dtype, device=device)
    if received.numel():
        dist.recv(received.view(-1).view(torch.uint8), sender, group)
    return received.cpu()


def packed(compressors: Compressors, states: list[State]) -> dict[str, Any]:
    """What a checkpoint gets: tensors and plain values alone.

    Args:
        compressors: whose settings are noted.
        states: of all ranks; none: they could not be asked.
    """
    return {"settings": str(compressors.compression), "seed": compressors.seed, "states": states}


def take(compressors: Compressors, saved: Mapping[str, Any], rank: int, size: int) -> str | None:
    """Takes over what a rank has in a checkpoint.

    Where it does not fit, only the count of steps is taken over, and what had not been sent is lost.

    Args:
        compressors: get their state.
        saved: from :func:`packed`.
        rank: this one's place among the ranks.
        size: number of the ranks.

    Returns:
        Why it does not fit; None: it does.
    """
    settings, states, here = saved["settings"], saved["states"], str(compressors.compression)
    if settings == here and len(states) == size:
        compressors.load_state_dict(states[rank])
        return None
    for place, compressor in compressors.by_place.items() if states else ():
        compressor.step = int(states[0].get(place, {}).get("step", 0))
    if not states:
        return "it was saved while training failed, and holds nothing of what ranks had not sent"
    return f"it is of {settings} on {len(states)} rank{'s' * (len(states) > 1)}, this run has {here} on {size}"
