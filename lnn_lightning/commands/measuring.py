"""A callback that measures what each rank of a training holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lnn_lightning.parallel.layout import DATA, PIPELINE, TENSOR
from lnn_lightning.planning.measure import PeakMemory, SavedWatch, compression_bytes, held_bytes, state_bytes
from lnn_lightning.strategies.ptdp import PTDPStrategy


class MeasureMemory(pl.Callback):
    """Measures parameters, gradients, optimizer state, saved activations and peak memory on each rank of a ``fit``.

    Args:
        folder: gets a file ``rank<n>.json`` of each rank when training ends; None: none.

    Attributes:
        measured: what was measured on this rank, in bytes, and its place.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self.measured: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PTDPStrategy)
        self._watch = SavedWatch(strategy.engine)
        strategy.engine.extensions.append(self._watch)
        self._peak = PeakMemory(strategy.root_device)
        axes = {"pipeline": PIPELINE, "data": DATA, "tensor": TENSOR}
        self.measured = {name: strategy.mesh.rank(axis) for name, axis in axes.items()}

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PTDPStrategy)
        self.measured |= held_bytes(strategy.engine)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PTDPStrategy)
        strategy.engine.extensions.remove(self._watch)
        self.measured |= {
            "optimizer": state_bytes(strategy.optimizers),
            "compression": compression_bytes(strategy._compressors) if strategy._compressors is not None else 0,
            "activations": self._watch.peak,
            "growth": self._peak.growth(),
        }
        if self.folder is not None:
            Path(self.folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(self.measured))
