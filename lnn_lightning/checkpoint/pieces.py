"""Which slices of a whole tensor a rank holds, in the words of ``torch.distributed.checkpoint``.

A checkpoint knows whole tensors alone: a rank says where the slices that it holds lie in them, and any other rank of
any other layout reads the slices that it needs. Nothing is put together on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangular slice of a whole tensor.

    Attributes:
        offsets: where it begins, by dimension.
        value: its data, usually a view of what the rank computes with; its shape is the slice's.
    """

    offsets: tuple[int, ...]
    value: Tensor


@dataclass(frozen=True, eq=False)
class Pieces:
    """What one rank holds of a whole tensor.

    Attributes:
        shape: of the whole.
        dtype: of its elements.
        pieces: slices, none overlapping another; ranks that hold the same slice have it with the same offsets.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def at(self, offsets: Sequence[int]) -> Tensor:
        """The slice that begins somewhere."""
        return next(piece.value for piece in self.pieces if piece.offsets == tuple(offsets)).detach()

    def copied(self, into: Pieces | None = None) -> Pieces:
        """A copy in host memory that no later step changes.

        Args:
            into: an earlier copy whose memory may be used again.
        """
        reused = {piece.offsets: piece.value for piece in into.pieces} if into is not None else {}
        copies = []
        for piece in self.pieces:
            host = reused.get(piece.offsets)
            if host is None or host.shape != piece.value.shape or host.dtype != piece.value.dtype:
                host = torch.empty(piece.value.shape, dtype=piece.value.dtype, pin_memory=piece.value.is_cuda)
            host.copy_(piece.value.detach(), non_blocking=True)
            copies.append(Piece(piece.offsets, host))
        return Pieces(self.shape, self.dtype, tuple(copies))

    # The protocol by which torch.distributed.checkpoint asks an object for its slices.

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece), properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.shape)
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self.pieces]


def whole_tensor(value: Tensor) -> Pieces:
    """A tensor that this rank holds as a whole."""
    return Pieces(tuple(value.shape), value.dtype, (Piece((0,) * value.ndim, value),))


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.value.shape)
