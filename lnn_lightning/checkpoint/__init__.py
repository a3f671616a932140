"""Saving and loading over many processes, in plain torch."""

from lnn_lightning.checkpoint.distributed import (
    is_distributed_checkpoint,
    load_full_state_dict,
    load_metadata,
    load_tensors,
    save_checkpoint,
    tensor_names,
)

__all__ = [
    "is_distributed_checkpoint",
    "load_full_state_dict",
    "load_metadata",
    "load_tensors",
    "save_checkpoint",
    "tensor_names",
]
