"""Losses that keep experts equally loaded, and DeepSeek's way to do without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Average: TypeAlias = Callable[[Tensor], Tensor]
"""The average of a small tensor over the ranks that have other tokens."""

BIAS_STEP = 0.001  # DeepSeek-V3, section 4.2: the bias update speed


def count_choices(expert: Tensor, experts: int) -> Tensor:
    """How many of the choices are each expert, [E] int64; those of no expert (-1) count for none.

    A comparison with every expert and not ``bincount``, which makes the host wait for the device.
    """
    return (expert.reshape(-1, 1) == torch.arange(experts, device=expert.device)).sum(0)


def fractions(counts: Tensor, dtype: torch.dtype, average: Average | None = None) -> Tensor:
    """The share of all choices that fell on each expert: of this rank's, or of all ranks' that ``average`` is over."""
    shares = counts.to(dtype)
    if average is not None:
        shares = average(shares)
    return shares / shares.sum().clamp_min(torch.finfo(dtype).tiny)


def balance_loss(probs: Tensor, share: Tensor) -> Tensor:
    r"""Switch's load balancing loss (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6) before its weight.

    .. math:: E \sum_i f_i P_i

    f_i is the share of the choices that fell on expert i, P_i the mean probability of expert i. It is 1 under uniform
    routing. f has no gradient, so with the shares of *all* ranks' tokens the average of the ranks' losses is exactly
    the loss of all tokens (if each rank has as many), without anything sent in the backward.

    Args:
        probs: the router's probabilities of all experts, [N, E].
        share: f, [E]; see :func:`fractions`.
    """
    tokens, experts = probs.shape
    return experts * (share * probs.sum(0) / max(tokens, 1)).sum()


def cv_squared(values: Tensor) -> Tensor:
    """The square of the coefficient of variation, (standard deviation / mean)^2: Shazeer et al. 2017, equation 7."""
    return values.var(correction=0) / values.mean().square().clamp_min(torch.finfo(values.dtype).tiny)


def z_loss(logits: Tensor) -> Tensor:
    r"""The router z-loss (ST-MoE, Zoph et al. 2022, arXiv 2202.08906, equation 5) before its weight.

    .. math:: \frac{1}{N} \sum_n \Bigl(\log \sum_i e^{x_{ni}}\Bigr)^2
    """
    return logits.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def auxiliary_loss(losses: dict[str, Tensor], weight: float, z_weight: float) -> Tensor | None:
    """What a gate's losses add to the training loss: the z-loss by its own weight, all others by ``weight``.

    Shazeer's importance and load losses have one weight, as in their language models (0.1 for both). None: nothing.
    """
    weights = {name: z_weight if name == "z" else weight for name in losses}
    terms = [weights[name] * loss for name, loss in losses.items() if weights[name]]
    return torch.stack(terms).sum() if terms else None


@torch.no_grad()
def update_bias(
    bias: Tensor, load: Tensor, step: float = BIAS_STEP, groups: Sequence[dist.ProcessGroup | None] = ()
) -> None:
    """Balances without a loss: moves the bias of experts with less than the mean load up, of those with more down.

    ``b_i += step * sign(mean load - load_i)`` once an optimizer step (Wang et al. 2024, arXiv 2408.15664, algorithm 1;
    DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        bias: [E], changed in place.
        load: tokens that chose each expert in the whole step on this rank, [E].
        step: the update speed.
        groups: process groups over which the load is added up, one after the other, so that the bias stays the same on
            all ranks: together they must cover the ranks that have other tokens, once. All their ranks must call this.
    """
    load = load.clone()
    for group in groups:
        dist.all_reduce(load, group=group)
    error = load.sum() - load * len(load)  # E times (mean - load): in whole numbers, so a tie is a tie
    bias.add_(error.sign().to(bias.dtype), alpha=step)
