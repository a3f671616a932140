"""A training that is set up in this process as on its first rank, and never launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.utilities import _parse_loop_limits
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.memory.recompute import Recompute, recompute_extension
from lnn_lightning.parallel.errors import LayoutError
from lnn_lightning.parallel.expert.upcycle import upcycle
from lnn_lightning.parallel.layout import Layout, Mesh, resolve_layout
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.parallel.step.units import Units
from lnn_lightning.planning.compression import PlannedCompression
from lnn_lightning.planning.memory import Prediction, predict
from lnn_lightning.planning.states import Copies
from lnn_lightning.precision import MeshAgreement, MeshHalfPrecision, mesh_precision
from lnn_lightning.strategies.ptdp import PTDPStrategy
from lnn_lightning.strategies.steps import LightningObserver


class _FirstPlace(Mesh):
    """The first rank of a layout, without the others."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, cast(Any, None), cast(Any, None))

    @override
    def group(self, axis: str) -> Any:
        return None

    @override
    def rank(self, axis: str) -> int:
        return 0


def predict_memory(
    trainer: pl.Trainer, module: pl.LightningModule, datamodule: pl.LightningDataModule | None = None, **loaders: Any
) -> Prediction:
    """Predicts what ``trainer.fit(module, ...)`` would need on each rank. Trainer and module are used up.

    Args:
        trainer: with a :class:`~lnn_lightning.PTDPStrategy`; its processes are not started.
        module: the user's.
        datamodule: its data.
        loaders: or its loaders, as ``fit`` takes them.

    Raises:
        LayoutError: another strategy, or sizes that do not fit the number of devices.
        StepError: the step cannot be followed, cut or divided.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, PTDPStrategy):
        raise LayoutError(
            f"The memory of a {type(strategy).__name__} is not known here. Set `strategy: lnn_lightning.PTDPStrategy` "
            "(one device is a layout too)."
        )
    layout = resolve_layout(trainer.num_nodes * trainer.num_devices, **strategy._sizes)
    strategy._mesh = _FirstPlace(layout)
    batch = _set_up(trainer, strategy, module, datamodule, loaders)
    if (expert := strategy._settings.expert) is not None and expert.upcycle is not None:
        upcycle(module, expert.upcycle)
    strategy.precision_plugin = mesh_precision(strategy.precision_plugin, MeshAgreement())
    strategy.precision_plugin.convert_module(module)
    module.train()
    settings = strategy._gradient_compression

    def make_optimizers() -> list[Optimizer]:
        return _init_optimizers_and_lr_schedulers(module)[0]

    prediction = predict(
        module,
        strategy._example_step("training_step"),
        strategy.precision_plugin.convert_input(batch),
        make_optimizers,
        LightningObserver(module),
        strategy._settings,
        layout,
        strategy._zero,
        partial(_extensions, strategy._recompute),
        _copies(strategy.precision_plugin),
        PlannedCompression(settings, layout, trainer.num_nodes) if settings is not None else None,
    )
    for setting, value in (
        ("activation_compression", strategy._activation_compression),
        ("offload", strategy._offload),
    ):
        if value is not None:
            prediction.notes.append(f"What `{setting}` saves is not in the prediction.")
    return prediction


def _extensions(
    recompute: Recompute, root: nn.Module, units: Units, stages: Mapping[int, Sequence[str]], sharded: bool
) -> list[StepExtension]:
    made = recompute_extension(recompute, root, units, stages, sharded)
    return [made] if made is not None else []


def _copies(plugin: Precision) -> Copies:
    if not isinstance(plugin, MeshHalfPrecision) or not plugin.has_copies:
        return None
    return "kept" if plugin.master_weights else "passing"


def _set_up(
    trainer: pl.Trainer,
    strategy: PTDPStrategy,
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    loaders: dict[str, Any],
) -> Any:
    """Does what ``Trainer.fit`` does before the strategy sets up; returns the first batch."""
    trainer.state.fn, trainer.state.status, trainer.training = TrainerFn.FITTING, TrainerStatus.RUNNING, True
    limits = _parse_loop_limits(trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs, trainer)
    trainer.fit_loop.min_epochs, trainer.fit_loop.max_epochs = limits
    strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=datamodule, **loaders)
    trainer._callback_connector._attach_model_callbacks()
    trainer._data_connector.prepare_data()
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        call._call_lightning_datamodule_hook(trainer, "setup", stage="fit")
    call._call_lightning_module_hook(trainer, "setup", stage="fit")
    with trainer.strategy.tensor_init_context():
        call._call_configure_model(trainer)
    with torch.enable_grad():
        return strategy.own_first_batch(trainer)
