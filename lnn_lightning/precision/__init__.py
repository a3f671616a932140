"""Precision plugins that agree over the mesh: clipping by one norm, loss scaling by one scale."""

from lnn_lightning.optim.block_scales import BlockScaling
from lnn_lightning.precision.agreement import MeshAgreement
from lnn_lightning.precision.plugins import (
    MeshDoublePrecision,
    MeshHalfPrecision,
    MeshMixedPrecision,
    MeshPrecision,
    loss_scale,
    mesh_precision,
    reduce_dtype_of,
)
from lnn_lightning.precision.scaler import MeshGradScaler

__all__ = [
    "BlockScaling",
    "MeshAgreement",
    "MeshDoublePrecision",
    "MeshGradScaler",
    "MeshHalfPrecision",
    "MeshMixedPrecision",
    "MeshPrecision",
    "loss_scale",
    "mesh_precision",
    "reduce_dtype_of",
]
