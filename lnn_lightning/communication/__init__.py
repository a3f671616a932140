"""Gradients in fewer bytes on the way between ranks."""

from lnn_lightning.communication.cast import Cast
from lnn_lightning.communication.compression import Compression, Compressor
from lnn_lightning.communication.ddp import attach
from lnn_lightning.communication.hierarchical import Hierarchical
from lnn_lightning.communication.local import LocalSGD
from lnn_lightning.communication.powersgd import PowerSGD, compression_ratio
from lnn_lightning.communication.running import Compressors

__all__ = [
    "Cast",
    "Compression",
    "Compressor",
    "Compressors",
    "Hierarchical",
    "LocalSGD",
    "PowerSGD",
    "attach",
    "compression_ratio",
]
