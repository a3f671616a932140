"""Averages of the weights that callbacks keep, made to fit a module whose parts live on different ranks.

Lightning's `WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging` copy the module before the strategy
divides it. Behind that, each rank keeps the average of what it holds: pieces of sharded parameters, nothing of what
lives elsewhere.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lnn_lightning.parallel.data.shards import is_sharded, local_of
from lnn_lightning.parallel.expert.settings import Upcycle
from lnn_lightning.parallel.expert.upcycle import upcycle
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors, replace_tensors, stand_in_for


def divide_averages(trainer: pl.Trainer, module: nn.Module) -> None:
    """Divides the averages that the Trainer's callbacks keep of a module as the module is divided."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            continue
        average: Any = callback._average_model
        if isinstance(average, AveragedModel):
            divide_like(average.module, module, fresh=not bool(average.n_averaged))
            average.update_parameters = MethodType(_update, average)  # type: ignore[method-assign]
        elif isinstance(average, nn.Module):
            divide_like(average, module, fresh=True)


def upcycle_averages(trainer: pl.Trainer, settings: Upcycle, seed: int) -> None:
    """Makes experts in the averages that the Trainer's callbacks keep of a dense module, as the module has them."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            average: Any = callback._average_model
            if isinstance(average, nn.Module):
                upcycle(average.module if isinstance(average, AveragedModel) else average, settings, seed)


def divide_like(copy: nn.Module, module: nn.Module, fresh: bool) -> None:
    """Gives a copy of a module, made before that was divided, the same parts.

    Args:
        copy: the copy.
        module: the divided module.
        fresh: the copy takes over the module's values, too (the strategy may have made or changed them since).
    """
    now = dict(named_tensors(module))
    with torch.no_grad():
        replace_tensors(copy, partial(_counterpart, now, fresh))


def _counterpart(now: dict[str, Tensor], fresh: bool, name: str, tensor: Tensor) -> Tensor:
    current = now.get(name)
    if current is None or is_stand_in(tensor) or is_sharded(tensor):
        return tensor
    if is_stand_in(current):
        return stand_in_for(current)
    if is_sharded(current) or tensor.is_meta or tensor.shape != current.shape:
        value = current.detach().to(tensor.dtype, copy=True)  # the callback copied before precision was set
        return nn.Parameter(value, tensor.requires_grad) if isinstance(current, nn.Parameter) else value
    if fresh:
        tensor.detach().copy_(current.detach())
    return tensor


def _update(average: AveragedModel, module: nn.Module) -> None:
    """``AveragedModel.update_parameters`` on the tensors that are here, each as a plain tensor."""
    whole = average.module
    try:
        average._modules["module"] = _Pieces(whole)
        AveragedModel.update_parameters(average, _Pieces(module))
    finally:
        average._modules["module"] = whole


class _Pieces(nn.Module):
    """What is here of a module's tensors, sharing memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for index, parameter in enumerate(module.parameters()):
            if not is_stand_in(parameter):
                piece = nn.Parameter(local_of(parameter.detach()), requires_grad=False)
                self.register_parameter(f"parameter_{index}", piece)
        for index, buffer in enumerate(module.buffers()):
            if not is_stand_in(buffer):
                self.register_buffer(f"buffer_{index}", buffer)
