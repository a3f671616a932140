"""Gradients in fewer bytes on the way between ranks."""

from lnn_lightning.communication.cast import Cast
from lnn_lightning.communication.compression import Compression, Compressor
from lnn_lightning.communication.ddp import attach
from lnn_lightning.communication.hierarchical import Hierarchical
from lnn_lightning.communication.local import LocalSGD
from lnn_lightning.communication.onebit import OneBit, SignSGD
from lnn_lightning.communication.powersgd import PowerSGD, compression_ratio
from lnn_lightning.communication.quantized import Quantized
from lnn_lightning.communication.running import Compressors
from lnn_lightning.communication.topk import TopK

__all__ = [
    "Cast",
    "Compression",
    "Compressor",
    "Compressors",
    "Hierarchical",
    "LocalSGD",
    "OneBit",
    "PowerSGD",
    "Quantized",
    "SignSGD",
    "TopK",
    "attach",
    "compression_ratio",
]
