"""The memory settings of a strategy: what is put around the engine's steps to keep less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lnn_lightning.memory.recompute import Recompute, recompute_extension
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.strategies.offloading import OffloadHooks


class MemoryHooks(OffloadHooks):
    """Recomputation, compression and offloading of a strategy."""

    if TYPE_CHECKING:
        _recompute: Recompute
        _activation_compression: Any

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
        return []

    def _fetching(self) -> list[StepExtension]:
        return []
