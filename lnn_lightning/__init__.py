"""Lightning strategies that train an ordinary LightningModule on many devices, without a change to its code.

Importing this package registers the strategy name ``ptdp``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lnn_lightning.strategies.ptdp import PTDPStrategy

__all__ = ["PTDPStrategy"]
__version__ = "0.1.0"

if "ptdp" not in StrategyRegistry:
    StrategyRegistry.register("ptdp", PTDPStrategy, description="pipeline, tensor and data parallel (PTD-P)")
