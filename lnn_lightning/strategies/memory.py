"""The memory settings of a strategy: what is put around the engine's steps to keep less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lnn_lightning.memory.gist import Gist, GistOperations
from lnn_lightning.memory.offload.activations import ActivationKeeper
from lnn_lightning.memory.recompute import Recompute, recompute_extension
from lnn_lightning.memory.report import Report
from lnn_lightning.memory.saved_tensors import SavedTensors
from lnn_lightning.parallel.exchange import all_or_none
from lnn_lightning.parallel.layout import DATA
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.strategies.moving import activation_keeper, check_disk, keep_gradients, keep_parameters, refuse_parts
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
        keeper, compression = self._keeper(), self._activation_compression
        if keeper is None and compression is None:
            return []
        buffers = {buffer.untyped_storage()._cdata for buffer in self.engine.root.buffers()}
        operations = GistOperations(compression, _tell) if compression is not None else None
        encoders = operations.encoders() if operations is not None else ()
        saved = SavedTensors(lambda tensor: tensor.untyped_storage()._cdata in buffers, encoders, keeper)
        if operations is not None:
            operations.attach(saved)
        return [each for each in (keeper, saved, operations) if each is not None]

    def _keeper(self) -> ActivationKeeper | None:
        """Where saved tensors go. Collective: a rank whose folder does not take them stops all."""
        settings = self._offload
        if settings is None or not settings.has("activations"):
            return None

        def make() -> ActivationKeeper | None:
            check_disk(settings)
            return activation_keeper(settings, self.root_device)

        return all_or_none(make, dist.group.WORLD, self.root_device)

    def _fetching(self) -> list[StepExtension]:
        """Parameters and gradients in files. Collective: a rank whose folder does not take them stops all."""
        settings = self._offload
        if settings is None:
            return []
        refuse_parts(settings, self.root_device.type, self.mesh.size(DATA), self._zero.stage)
        if not settings.in_file or not (settings.has("parameters") or settings.has("gradients")):
            return []  # what the CPU computes with is in host memory already

        def make() -> list[StepExtension]:
            made: list[StepExtension] = []
            if not settings.has("activations"):
                check_disk(settings)
            if settings.has("parameters"):
                made.append(keep_parameters(self.engine, settings))
            if settings.has("gradients"):
                made.append(keep_gradients(self.engine, settings))
            return made

        return all_or_none(make, dist.group.WORLD, self.root_device)


def _tell(report: Report) -> None:
    rank_zero_info(f"Kept for the backward of one micro-batch on rank 0:\n{report.table()}")
