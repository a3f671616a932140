"""Saving and loading over many processes, in plain torch."""

from lnn_lightning.checkpoint.distributed import (
    is_distributed_checkpoint,
    load_full_state_dict,
    load_metadata,
    load_tensors,
    save_checkpoint,
    tensor_names,
)
from lnn_lightning.checkpoint.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "is_distributed_checkpoint",
    "load_full_state_dict",
    "load_metadata",
    "load_tensors",
    "save_checkpoint",
    "tensor_names",
]
