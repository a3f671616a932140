"""Checkpoint folders and tensors to put into them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.checkpoint import save_checkpoint
from lnn_lightning.checkpoint.pieces import Piece, Pieces
from tests.helpers.ranks import run_ranks


def tensors() -> dict[str, Tensor]:
    """Of several kinds, in an order that is not that of their names."""
    rng = torch.Generator().manual_seed(0)
    return {
        "net.10.weight": torch.randn(12, 10, generator=rng),
        "net.2.weight": torch.randn(9, 7, 3, generator=rng).bfloat16(),
        "net.2.bias": torch.randn(9, generator=rng, dtype=torch.float64),
        "scale": torch.tensor(1.25),
        "steps": torch.tensor(3),
        "mask": torch.randn(5, generator=rng) > 0,
        "none": torch.empty(0, 4),
        "table": torch.randint(0, 9, (6, 2), generator=rng),
    }


def write(path: Path, state: dict[str, Tensor], tied: dict[str, str] | None = None, **metadata: Any) -> None:
    """A checkpoint of one rank with this ``state_dict``; numbers are stored apart, as strategies store them."""
    entries = {f"state_dict.{key}": value for key, value in state.items()}
    ours = {
        "format": 2,
        "layout": [1, 1, 1],
        "optimizer_groups": [],
        "values": {key: value for key, value in entries.items() if value.ndim == 0},
        "tied": tied or {},
        "ranks": [{"loaders": []}],
    }
    arrays = {key: value for key, value in entries.items() if value.ndim > 0}
    run_ranks(_write, 1, str(path), arrays, {"pytorch-lightning_version": "2.6.6", "lnn_lightning": ours, **metadata})


def _write(rank: int, world_size: int, path: str, arrays: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    save_checkpoint(path, arrays, metadata)


def parts(whole: Tensor, *regions: tuple[slice, ...], dtype: torch.dtype | None = None) -> Pieces:
    """Empty slices of a tensor."""
    pieces = [
        Piece(tuple(each.start for each in region), torch.zeros_like(whole[region], dtype=dtype)) for region in regions
    ]
    return Pieces(tuple(whole.shape), dtype or whole.dtype, tuple(pieces))
