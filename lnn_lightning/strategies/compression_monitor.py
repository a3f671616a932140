"""What gradient compression does, as metrics."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lnn_lightning.communication import Compressors
from lnn_lightning.communication.report import Bytes, Report
from lnn_lightning.communication.settings import is_number
from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.strategies.compression import CompressionHooks
from lnn_lightning.strategies.ddp_hooks import CarriedCompression


def compressors_of(trainer: pl.Trainer) -> Compressors | None:
    """What compresses the gradients of the module that a Trainer trains; None: nothing does."""
    if isinstance(trainer.strategy, CompressionHooks):
        return trainer.strategy._compressors
    settings: Any = getattr(trainer.strategy, "_ddp_comm_hook", None)  # of Lightning's DDPStrategy
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, CarriedCompression) and callback.is_for(trainer.lightning_module, settings):
            return callback.compressors
    return None


class CompressionMonitor(pl.Callback):
    """Logs what gradient compression does to the bytes of a step, and what it has not sent yet.

    Every n optimizer steps, over the steps since the last time, for a copy of the model (stages, tensor parts and
    shards together; the mean over data ranks):

    * ``compression/payload_mb``: handed to collectives a step, in 1e6 bytes; ``compression/sent_mb``: leave ranks a
      step, if collectives go round a ring.
    * ``compression/ratio``: bytes of the gradients over those handed to collectives.
    * ``compression/error_norm``: norm of the error a data rank has kept back, which is added to its next gradient
      (root of the mean square over data ranks); ``compression/relative_error``: the same over the norm of the last
      step's mean gradient, before clipping. Both where the compression has error feedback.

    Where gradients of experts are averaged apart, or hosts are treated apart (``Hierarchical``), the first three are
    logged for each too: ``compression/expert_data/ratio``, ``compression/outer/ratio``.

    A line at the end of training says what it came to.

    Args:
        every_n_steps: between reports, which ranks make together.

    Raises:
        LayoutError: ``every_n_steps`` is not a whole number of at least 1.
        StepError: (when training starts) the strategy does not compress gradients.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if not is_number(every_n_steps, whole=True) or every_n_steps < 1:
            raise LayoutError(f"`every_n_steps` must be a whole number of at least 1, got {every_n_steps!r}.")
        self.every_n_steps = every_n_steps
        self._report: Report | None = None
        self._whole: Report | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        compressors = compressors_of(trainer)
        strategy = trainer.strategy
        self._report = self._whole = None
        if compressors is not None:
            self._report, self._whole = Report(compressors), Report(compressors)
        elif not isinstance(strategy, CompressionHooks) or strategy._gradient_compression is None:
            raise StepError(
                f"CompressionMonitor has nothing to watch: this {type(strategy).__name__} does not compress gradients. "
                "Use `PTDPStrategy(gradient_compression=PowerSGD(rank=4))` or `DDPStrategy(ddp_comm_hook=PowerSGD("
                "rank=4))`, or leave the callback out."
            )
        self._first = self._last = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._report is not None and trainer.global_step + 1 - self._last >= self.every_n_steps:
            self._report.measure()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        steps = trainer.global_step - self._last
        if self._report is None or steps < self.every_n_steps:
            return
        self._last = trainer.global_step
        found = self._report.take(steps)
        values = {"error_norm": found.error, "relative_error": found.relative_error}
        for name, part in {"": found.total, **found.parts}.items():
            prefix = f"{name}/" if name else ""
            values |= {f"{prefix}payload_mb": part.payload / 1e6, f"{prefix}sent_mb": part.sent / 1e6}
            values[f"{prefix}ratio"] = part.ratio if part.payload else None
        metrics = {f"compression/{name}": value for name, value in values.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = trainer.global_step - self._first
        if self._whole is None or not steps:
            return
        found = self._whole.take(steps)
        lines = [f"gradient compression: {_in_words(found.total)}"]
        lines += [f"  {name}: {_in_words(part)}" for name, part in found.parts.items()]
        rank_zero_info("\n".join(lines))


def _in_words(part: Bytes) -> str:
    if not part.payload:
        return "nothing was sent"
    return f"{part.payload / 1e6:.4g} MB a step in place of {part.plain / 1e6:.4g} MB, ratio {part.ratio:.4g}"
