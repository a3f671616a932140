"""Where tokens go, and what all gates do alike: precision, places within a capacity, losses, the check for NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.balance import Average, balance_loss, count_choices, fractions, z_loss
from lnn_lightning.parallel.expert.capacity import capacity_of, within_capacity
from lnn_lightning.parallel.expert.settings import check_capacity

Remember: TypeAlias = Callable[[Callable[[], Tensor]], Tensor]
"""Keeps a value for a second run of the same forward (recomputation), so that tokens do not choose again."""


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Attributes:
        expert: experts of each token, the first choice first, [N, k] int64; -1: none (dropped, or not sent).
        weights: what each expert's output is multiplied by, [N, k], differentiable, in fp32 or higher. Those of
            ``expert == -1`` mean nothing.
        losses: scalars to be weighted and added to the loss: "balance", "importance", "load", "z".
        load: tokens that chose each expert, before any is dropped, [E] int64.
        dropped: choices for which an expert had no room, a scalar int64 tensor (expert choice: tokens that no expert
            chose).
        finite: whether the router's logits are numbers, a scalar bool tensor on the device.
    """

    expert: Tensor
    weights: Tensor
    losses: dict[str, Tensor]
    load: Tensor
    dropped: Tensor
    finite: Tensor


def at_once(make: Callable[[], Tensor]) -> Tensor:
    """Remembers nothing: makes the value."""
    return make()


def checked_logits(logits: Tensor, k: int, capacity_factor: float | None) -> Tensor:
    """The logits in the precision that gates compute in.

    Raises:
        LayoutError: there are fewer experts than a token is to go to, or the capacity factor makes no sense.
    """
    experts = logits.shape[-1]
    if not 0 < k <= experts:
        raise LayoutError(f"A token cannot go to {k} of {experts} experts.")
    check_capacity("capacity_factor", capacity_factor)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def balance_of(probs: Tensor, chosen: Tensor, average: Average | None, remember: Remember) -> Tensor:
    """The balancing loss; remembered shares spare recomputation the exchange with other ranks."""
    experts = probs.shape[1]
    return balance_loss(probs, remember(lambda: fractions(count_choices(chosen, experts), probs.dtype, average)))


def place(
    logits: Tensor,
    chosen: Tensor,
    weights: Tensor,
    losses: dict[str, Tensor],
    capacity_factor: float | None,
    sent: Tensor | None = None,
) -> Routing:
    """Gives places to what was chosen; ``sent`` says which choices are meant to go anywhere at all."""
    tokens, experts = logits.shape
    expert = chosen
    if capacity_factor is not None:
        room = capacity_of(tokens, experts, chosen.shape[1], capacity_factor)
        expert = within_capacity(chosen, None, experts, room)
    if sent is not None:
        chosen, expert = (torch.where(sent, value, -1) for value in (chosen, expert))
    dropped = ((expert < 0) & (chosen >= 0)).sum()
    losses = {**losses, "z": z_loss(logits)}
    return Routing(expert, weights, losses, count_choices(chosen, experts), dropped, logits.isfinite().all())
