"""``LightningModule.load_from_checkpoint`` on checkpoint folders, which Lightning would open as a file."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core import saving
from torch import Tensor

from lnn_lightning.checkpoint import is_distributed_checkpoint, load_full_state_dict, load_metadata
from lnn_lightning.checkpoint.manifest import MANIFEST, verify


def whole_checkpoint(path: str | Path, device: torch.device | str | None = None) -> dict[str, Any]:
    """A checkpoint folder as Lightning knows checkpoints, the module's whole ``state_dict`` in it; no optimizer state.

    Args:
        path: the folder.
        device: where the tensors go; None: they stay in host memory.

    Raises:
        CheckpointError: a file is damaged or missing.
    """
    if (Path(path) / MANIFEST).is_file():
        verify(Path(path))
    checkpoint = load_metadata(path)
    state = load_full_state_dict(path)
    if device is not None:
        for key, value in state.items():
            state[key] = value.to(device) if isinstance(value, Tensor) else value
    return {**checkpoint, "state_dict": state}


def let_lightning_read_folders() -> None:
    """Teaches ``load_from_checkpoint`` our folders; files are read as before."""
    original = saving.pl_load
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | Path) and is_distributed_checkpoint(path_or_url):
            device = map_location if isinstance(map_location, str | torch.device) else None
            return whole_checkpoint(path_or_url, device)
        return original(path_or_url, map_location=map_location, weights_only=weights_only)

    saving.pl_load = load
