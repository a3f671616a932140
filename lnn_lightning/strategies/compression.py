"""Compression of gradients in a strategy whose ranks hold parts of the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lnn_lightning.communication import Compression, Compressors

if TYPE_CHECKING:
    from lnn_lightning.parallel.pipeline.engine import PipelineEngine


class CompressionHooks:
    """Compression part of a strategy."""

    _gradient_compression: Compression | None = None
    _compressors: Compressors | None = None

    if TYPE_CHECKING:

        @property
        def engine(self) -> PipelineEngine:  # noqa: D102 - the strategy has it
            ...

    def setup_compression(self) -> None:
        """Makes what compresses the gradients of this module, once; before training."""
        if self._gradient_compression is None or self.engine.reduction is not None:
            return
        reduce_dtype = self.engine.settings.reduce_dtype
        self._compressors = Compressors(self._gradient_compression, self.engine.seed, reduce_dtype)
        self.engine.reduction = self._compressors
