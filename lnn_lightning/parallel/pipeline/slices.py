"""Where what a rank holds lies in the whole tensor: its tensor rank's part of a dimension, its data rank's rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from lnn_lightning.checkpoint.pieces import Piece, Pieces
from lnn_lightning.parallel.data.shards import local_of, span_of


def slices_of(
    value: Tensor, whole_shape: Sequence[int], divided: tuple[int, list[tuple[int, int, int]]] | None
) -> Pieces:
    """The slices of a whole tensor that a rank holds.

    Args:
        value: what the module has: a tensor, or a sharded one of which this rank has some rows.
        whole_shape: shape of the whole.
        divided: the dimension that tensor ranks divide, and the runs of this one's part: (first index in the part,
            first in the whole, length); None: ``value`` is all of it but for sharding.

    Returns:
        Slices whose values share the memory of ``value``. Padding is in none.
    """
    local = local_of(value)
    first = _first_row(value)
    pieces = []
    if local.ndim == 0:
        return Pieces((), value.dtype, (Piece((), local),))
    dim, runs = divided if divided is not None else (0, [(0, 0, value.shape[0])])
    for part_start, whole_start, length in runs:
        offsets = [0] * local.ndim
        offsets[0] = first
        held_from = first if dim == 0 else 0
        start = max(part_start, held_from)
        end = min(part_start + length, held_from + local.shape[dim])
        if end < start or (end == start and length > 0):
            continue
        offsets[dim] = whole_start + start - part_start
        piece = local.narrow(dim, start - held_from, end - start)
        if piece.numel() > 0 or not isinstance(value, DTensor):
            pieces.append(Piece(tuple(offsets), piece))
    return Pieces(tuple(whole_shape), value.dtype, tuple(pieces))


def _first_row(value: Tensor) -> int:
    if not isinstance(value, DTensor):
        return 0
    mesh = value.device_mesh
    return span_of(value.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))[0]
