"""Layers of experts in a strategy: their losses in the gradients, their balance, what is logged about their load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lnn_lightning.parallel.expert.account import Account, Tally, balance_biases
from lnn_lightning.parallel.expert.layer import moe_layers
from lnn_lightning.parallel.expert.loads import block_loads, summed_loads
from lnn_lightning.parallel.expert.picture import LoadHistory
from lnn_lightning.parallel.layout import DATA, TENSOR
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.parallel.reduction import mean_over
from lnn_lightning.strategies.memory import MemoryHooks

_FIRST_PICTURE = 16
"""Loads noted before the first picture; the next ones come at twice, four times, ... as many."""
_FILE = "moe_load.svg"


class ExpertHooks(MemoryHooks):
    """Expert part of a strategy."""

    _accounted: PipelineEngine | None = None
    _account: Account | None = None
    _loads: LoadHistory
    _noted = 0

    def setup_experts(self) -> None:
        """Keeps account of the engine's layers of experts, once."""
        engine = self.engine
        if self._accounted is engine:
            return
        self._accounted, self._account = engine, None
        self._loads, self._noted = LoadHistory(), 0
        if layers := moe_layers(engine.root):
            average = partial(mean_over, group=self.mesh.group(DATA)) if self.mesh.size(DATA) > 1 else None
            self._account = Account(layers, lambda: engine.scale, average)
            engine.extensions.append(self._account)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self._account is not None:
            balance_biases(self._account, self.mesh.group(DATA) if self.mesh.size(DATA) > 1 else None)
        return result

    # ---------------------------------------------------------------- logging

    @override
    def training_step(self, batch: Any, *arguments: Any) -> Any:
        result = super().training_step(batch, *arguments)
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        every, step = trainer.log_every_n_steps, trainer.fit_loop.epoch_loop._batches_that_stepped
        if trainer.fast_dev_run or (every > 0 and (step + 1) % every == 0):
            self._log_loads(trainer)
        return result

    def _log_loads(self, trainer: pl.Trainer) -> None:
        """Logs the loads since the last time. Collective over all ranks, if there are experts."""
        loads, parts = block_loads(self._account, self.engine.residence.expert)
        if not loads:
            return
        total = summed_loads(loads, self.root_device)
        for name, value in self._metrics(total, parts).items():
            self.lightning_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)  # type: ignore[union-attr]
        if trainer.is_global_zero and trainer.loggers:
            self._loads.add(trainer.global_step, {name: each.load for name, each in total.items()})
            self._noted += 1
            if self._noted >= _FIRST_PICTURE and self._noted & (self._noted - 1) == 0:
                self._show(trainer)

    def _metrics(self, loads: Mapping[str, Tally], parts: int) -> dict[str, Tensor]:
        blocks = list(loads.values())
        metrics = {}
        if self._account is not None:
            runs = max(parts, 1) * self.mesh.size(DATA) * self.mesh.size(TENSOR)
            metrics["moe/aux_loss"] = torch.stack([block.loss for block in blocks]).sum() / runs
        largest = [block.load.max() * len(block.load) / block.load.sum().clamp_min(1) for block in blocks]
        metrics["moe/load_max"] = torch.stack(largest).max()
        dropped, asked = sum(block.dropped for block in blocks), sum(block.asked for block in blocks)
        metrics["moe/dropped"] = torch.as_tensor(dropped / max(float(asked), 1.0))
        return {name: value.float() for name, value in metrics.items()}

    @override
    def on_train_end(self) -> None:
        assert self.lightning_module is not None
        if self._accounted is not None and self._noted:
            self._show(self.lightning_module.trainer)
        super().on_train_end()

    def _show(self, trainer: pl.Trainer) -> None:
        """Hands the picture of the loads to the loggers."""
        for logger in trainer.loggers:
            try:
                show_loads(logger, self._loads, trainer.global_step)
            except Exception as error:  # noqa: BLE001 - a picture is not worth a run
                rank_zero_warn(f"{type(logger).__name__} could not take the picture of the experts' load: {error}")


def show_loads(logger: Logger, loads: LoadHistory, step: int) -> None:
    """Hands a picture of loads to a logger: as an image if it takes some, otherwise as a file in its folder."""
    if isinstance(logger, DummyLogger):
        return
    if callable(log_image := getattr(logger, "log_image", None)):
        log_image(key="moe/load", images=[loads.image().permute(1, 2, 0).numpy()], step=step)
        return
    if callable(add_image := getattr(getattr(logger, "experiment", None), "add_image", None)):
        try:
            add_image("moe/load", loads.image(), step)
            return
        except ImportError:  # its own summary writer needs pillow for pictures
            pass
    if (folder := getattr(logger, "log_dir", None)) is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / _FILE).write_text(loads.svg())
