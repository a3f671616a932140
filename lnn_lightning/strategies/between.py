"""Who could see parameters between two steps: the user's hooks and callbacks, as far as Lightning tells."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

_HARMLESS = (
    *(callbacks.ModelCheckpoint, callbacks.Checkpoint, callbacks.OnExceptionCheckpoint, callbacks.EarlyStopping),
    *(callbacks.ProgressBar, callbacks.TQDMProgressBar, callbacks.RichProgressBar, callbacks.LearningRateMonitor),
    *(callbacks.Timer, callbacks.ModelSummary, callbacks.RichModelSummary, callbacks.DeviceStatsMonitor),
    *(callbacks.GradientAccumulationScheduler, callbacks.ThroughputMonitor, callbacks.SpikeDetection, Callback),
)
"""Lightning's own that look at no parameter, or through a state dict."""

AROUND_STEPS = ("on_train_batch_start", "on_train_batch_end")
"""Hooks between two steps, before which a callback of ours can wait."""
_UNSEEN = (
    *("optimizer_step", "lr_scheduler_step", "on_before_batch_transfer", "transfer_batch_to_device"),
    *("on_after_batch_transfer", "on_validation_model_zero_grad", "on_validation_model_eval"),
)
"""Others of the module and the datamodule there, before which nothing of ours runs."""
IN_STEP = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "backward"),
    *("optimizer_zero_grad", "configure_gradient_clipping", "optimizer_step"),
)
"""Hooks between the making of gradients and the step of the optimizer."""


def watchers(trainer: pl.Trainer, hooks: tuple[str, ...]) -> list[str]:
    """Who has code of their own in some hooks, as ``Class.hook``."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    found = [f"{type(module).__name__}.{hook}" for hook in hooks if _overrides(module, hook, pl.LightningModule)]
    if data is not None:
        found += [f"{type(data).__name__}.{hook}" for hook in hooks if _overrides(data, hook, pl.LightningDataModule)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        found += [f"{type(callback).__name__}.{hook}" for hook in hooks if _of_callback(callback, hook)]
    return found


def unseen(trainer: pl.Trainer) -> list[str]:
    """Whose code runs between two steps, without a chance to wait before it."""
    found = watchers(trainer, _UNSEEN)
    for config in trainer.lr_scheduler_configs:
        kind = type(config.scheduler)
        if not kind.__module__.startswith("torch."):
            found.append(f"the scheduler {kind.__name__}")
    return found


def _overrides(owner: Any, hook: str, parent: type) -> bool:
    return hasattr(parent, hook) and (hook in vars(owner) or is_overridden(hook, owner, parent=parent))


def _of_callback(callback: Callback, hook: str) -> bool:
    if isinstance(callback, SettledFirst):
        return False
    if hook in vars(callback):
        return True
    return next((kind not in _HARMLESS for kind in type(callback).__mro__ if hook in vars(kind)), False)


class SettledFirst(Callback):
    """Waits for an offloaded optimizer's work before the code of others; stands first among the callbacks.

    Args:
        settle: waits.
        around_steps: do so around every step too.
    """

    def __init__(self, settle: Any, around_steps: bool) -> None:
        self._settle, self._around_steps = settle, around_steps

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        if self._around_steps:
            self._settle()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        if self._around_steps:
            self._settle()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._settle()

    @override
    def on_validation_start(self, *_: Any) -> None:
        self._settle()

    @override
    def on_train_end(self, *_: Any) -> None:
        self._settle()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with suppress(Exception):  # the first error is what the user needs to know
            self._settle()
