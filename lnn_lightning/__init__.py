"""Lightning strategies that train an ordinary LightningModule on many devices, without a change to its code.

Importing this package registers the strategy names ``ptdp``, ``expert_parallel`` and ``offload``, lets
``load_from_checkpoint`` read checkpoint folders and Lightning's ``DDPStrategy`` call the gradient compressions here.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lnn_lightning.communication import (
    Cast,
    Hierarchical,
    LocalSGD,
    OneBit,
    PowerSGD,
    Quantized,
    SignSGD,
    TopK,
)
from lnn_lightning.memory.gist import Gist
from lnn_lightning.memory.offload.settings import Offload
from lnn_lightning.optim import Adafactor
from lnn_lightning.parallel.expert.settings import ExpertParallel, Upcycle
from lnn_lightning.strategies.compression_monitor import CompressionMonitor
from lnn_lightning.strategies.ddp_hooks import let_lightning_call_our_hooks
from lnn_lightning.strategies.expert import ExpertParallelStrategy
from lnn_lightning.strategies.offload import OffloadStrategy
from lnn_lightning.strategies.ptdp import PTDPStrategy
from lnn_lightning.strategies.reading import let_lightning_read_folders

__all__ = [
    "Adafactor",
    "Cast",
    "CompressionMonitor",
    "ExpertParallel",
    "ExpertParallelStrategy",
    "Gist",
    "Hierarchical",
    "LocalSGD",
    "Offload",
    "OffloadStrategy",
    "OneBit",
    "PTDPStrategy",
    "PowerSGD",
    "Quantized",
    "SignSGD",
    "TopK",
    "Upcycle",
]
__version__ = "0.1.0"

let_lightning_read_folders()
let_lightning_call_our_hooks()
if "ptdp" not in StrategyRegistry:
    StrategyRegistry.register("ptdp", PTDPStrategy, description="pipeline, tensor and data parallel (PTD-P)")
if "expert_parallel" not in StrategyRegistry:
    StrategyRegistry.register("expert_parallel", ExpertParallelStrategy, description="experts shared out over ranks")
if "offload" not in StrategyRegistry:
    StrategyRegistry.register("offload", OffloadStrategy, description="training state in host memory or in files")
