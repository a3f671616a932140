"""Slices filled from a whole tensor of which any region can be had."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lnn_lightning.checkpoint.pieces import Pieces


@torch.no_grad()
def fill(pieces: Pieces, region: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Writes the values of slices, in their own dtype and where they are.

    Args:
        pieces: slices of a whole tensor.
        region: gives a part of the whole; asked for these slices alone.
    """
    for piece in pieces.pieces:
        if piece.value.numel():
            ends = zip(piece.offsets, piece.value.shape, strict=True)
            piece.value.copy_(region(tuple(slice(start, start + length) for start, length in ends)))
