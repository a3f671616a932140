"""How many tokens an expert takes, and which ones if more choose it."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def capacity_of(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Rows that an expert takes of so many tokens: ``factor`` times its even share, rounded up (GShard, 3.2)."""
    exact = Fraction(f"{factor:.12g}")  # as it was written: 1.1 * 50 / 11 is five, and in floating point a bit more
    return math.ceil(exact * top_k * tokens / experts)


def within_capacity(expert: Tensor, weights: Tensor | None, experts: int, capacity: int) -> Tensor:
    """Drops the choices that an expert has no room for.

    An expert takes first choices before second ones, and those in the order of the tokens (GShard, Lepikhin et al.
    2021, arXiv 2006.16668, algorithm 1).

    Args:
        expert: the choices of each token [tokens, choices]; other numbers than 0 to ``experts - 1`` take no room.
        weights: the first choice of a token is that of the largest weight; None: the first in ``expert``.
        experts: number of experts.
        capacity: rows that each takes.

    Returns:
        ``expert`` with -1 for choices that are dropped.
    """
    tokens, choices = expert.shape
    if weights is not None:
        ranking = weights.sort(dim=1, descending=True, stable=True).indices
        expert = expert.gather(1, ranking)
    queue = expert.t().flatten()
    key = torch.where((queue >= 0) & (queue < experts), queue, experts)
    key, order = key.sort(stable=True)
    first = torch.searchsorted(key, key)
    place = torch.arange(len(key), device=key.device) - first
    taken = torch.empty_like(queue)
    taken[order] = torch.where((key < experts) & (place < capacity), key, -1)
    taken = taken.view(choices, tokens).t()
    if weights is not None:
        taken = torch.empty_like(taken).scatter_(1, ranking, taken)
    return taken.contiguous()
