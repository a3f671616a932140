"""The memory settings of a strategy: what is put around the engine's steps to keep less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lnn_lightning.memory.gist import Gist, GistOperations
from lnn_lightning.memory.recompute import Recompute, recompute_extension
from lnn_lightning.memory.report import Report
from lnn_lightning.memory.saved_tensors import SavedTensors
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.strategies.offloading import OffloadHooks


class MemoryHooks(OffloadHooks):
    """Recomputation, compression and offloading of a strategy."""

    if TYPE_CHECKING:
        _recompute: Recompute
        _activation_compression: Gist | None

    _extended: PipelineEngine | None = None

    def setup_memory(self, trainer: pl.Trainer) -> None:
        """Puts what the settings ask for around the steps of the engine, once; parameters are on their device."""
        if self._extended is not self.engine:
            self._extended = self.engine
            # A unit that runs again in backward has its parameters fetched and its values packed again.
            self.engine.extensions.extend([*self._recomputing(), *self._packing(), *self._fetching()])

    def _recomputing(self) -> list[StepExtension]:
        engine = self.engine
        stages = {
            stage: [name for name, owners in engine.ownership.units.items() if stage in owners]
            for stage in engine.stages
        }
        sharded = engine.sharding is not None
        made = recompute_extension(self._recompute, engine.root, engine.book.units, stages, sharded)
        return [made] if made is not None else []

    def _packing(self) -> list[StepExtension]:
        if self._activation_compression is None:
            return []
        buffers = {buffer.untyped_storage()._cdata for buffer in self.engine.root.buffers()}
        operations = GistOperations(self._activation_compression, _tell)
        saved = SavedTensors(lambda tensor: tensor.untyped_storage()._cdata in buffers, operations.encoders())
        operations.attach(saved)
        return [saved, operations]

    def _fetching(self) -> list[StepExtension]:
        return []


def _tell(report: Report) -> None:
    rank_zero_info(f"Kept for the backward of one micro-batch on rank 0:\n{report.table()}")
