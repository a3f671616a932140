"""Where what a rank holds lies in the whole tensor: its part of divided dimensions, its data rank's rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from torch import Tensor
from torch.distributed.tensor import DTensor

from lnn_lightning.checkpoint.pieces import Piece, Pieces
from lnn_lightning.parallel.data.shards import local_of, span_of


def slices_of(
    value: Tensor, whole_shape: Sequence[int], divided: Sequence[tuple[int, list[tuple[int, int, int]]]] = ()
) -> Pieces:
    """The slices of a whole tensor that a rank holds.

    Args:
        value: what the module has: a tensor, or a sharded one of which this rank has some rows.
        whole_shape: shape of the whole.
        divided: dimensions that ranks divide, each with the runs of this one's part: (first index in the part, first in
            the whole, length); none: ``value`` is all of it but for sharding.

    Returns:
        Slices whose values share the memory of ``value``. Padding is in none.
    """
    local = local_of(value)
    first = _first_row(value)
    if local.ndim == 0:
        return Pieces((), value.dtype, (Piece((), local),))
    runs_of = {0: [(0, 0, value.shape[0])]} | dict(divided)
    pieces = []
    for runs in product(*runs_of.values()):
        offsets, piece = [0] * local.ndim, local
        for dim, (part_start, whole_start, length) in zip(runs_of, runs, strict=True):
            held_from = first if dim == 0 else 0
            start = max(part_start, held_from)
            end = min(part_start + length, held_from + local.shape[dim])
            if end < start or (end == start and length > 0):
                break
            offsets[dim] = whole_start + start - part_start
            piece = piece.narrow(dim, start - held_from, end - start)
        else:
            if piece.numel() > 0 or not isinstance(value, DTensor):
                pieces.append(Piece(tuple(offsets), piece))
    return Pieces(tuple(whole_shape), value.dtype, tuple(pieces))


def _first_row(value: Tensor) -> int:
    if not isinstance(value, DTensor):
        return 0
    mesh = value.device_mesh
    return span_of(value.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))[0]
