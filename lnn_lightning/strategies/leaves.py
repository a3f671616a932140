"""Values of checkpoints as the module and its optimizers hold them: parts, pieces, room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lnn_lightning.parallel.data.shards import is_sharded, local_of, piece_of, sharded_like
from lnn_lightning.parallel.tensor.axis import reduced_shape


def has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether some module changes a state dict before it is loaded."""
    return any(each._load_state_dict_pre_hooks for each in module.modules())


def plain_optimizer(optimizer: Any) -> Optimizer:
    """An optimizer without Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def sharded_leaf(value: Any, held: Tensor, parameter: Tensor, reduced: Sequence[int] = ()) -> Any:
    """A leaf of optimizer state as the module has the parameter: of a piece's state, a sharded tensor."""
    if is_sharded(parameter) and 0 not in reduced and isinstance(value, Tensor):
        if value.shape == reduced_shape(held.shape, reduced):
            return sharded_like(value, parameter, reduced_shape(parameter.shape, reduced))
    return value


def room_like(now: Tensor, dtype: torch.dtype) -> Tensor:
    """Room in host memory for what this rank holds of a tensor; padding is zero."""
    room = torch.zeros(local_of(now).shape, dtype=dtype)
    return sharded_like(room, now) if is_sharded(now) else room


def state_like(parameter: Tensor, dtype: torch.dtype, held: Any, reduced: Sequence[int] = ()) -> Tensor:
    """Where an optimizer's state of a parameter goes: where it was, if the optimizer has some already."""
    shape = reduced_shape(local_of(parameter).shape, reduced)
    if not isinstance(held, Tensor) or held.shape != shape or held.dtype != dtype:
        held = torch.zeros(shape, dtype=dtype)
    leaf = sharded_leaf(held, local_of(parameter), parameter, reduced)
    assert isinstance(leaf, Tensor)
    return leaf


def own_part(value: Any, parameter: Tensor, reduced: Sequence[int] = ()) -> Any:
    """This rank's part of a whole leaf of optimizer state."""
    if is_sharded(parameter) and 0 not in reduced and isinstance(value, Tensor):
        if value.shape == reduced_shape(parameter.shape, reduced):
            return piece_of(value, parameter)
    return value
