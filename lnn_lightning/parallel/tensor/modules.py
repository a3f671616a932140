"""How sharded layers take the place of the user's: by their ``forward``; class, names, state and copies stay.

A linear layer, an attention or a unit gets a ``forward`` of its own. Parameters that bare functions use
(``F.linear(x, self.weight)``) are recognised by a mode that is on while their unit runs (``calls.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lnn_lightning.parallel.tensor.calls import section_linear, transposed_linear
from lnn_lightning.parallel.tensor.layers import Role, run_linear
from lnn_lightning.parallel.tensor.multihead import Sections, expanded_forward, project_with
from lnn_lightning.parallel.tensor.region import current_region

_state = threading.local()


@contextmanager
def sharding_suspended() -> Iterator[None]:
    """Sharded modules do inside what they did before they were sharded (with whole parameters put in their place)."""
    before = getattr(_state, "suspended", False)
    _state.suspended = True
    try:
        yield
    finally:
        _state.suspended = before


@contextmanager
def planning() -> Iterator[None]:
    """Attention computes in operations that have rules inside, also where sharding is suspended."""
    before = getattr(_state, "planning", False)
    _state.planning = True
    try:
        yield
    finally:
        _state.planning = before


def is_suspended() -> bool:
    """Whether :func:`sharding_suspended` is around."""
    return getattr(_state, "suspended", False)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None


Forward = Callable[..., Any] | None
"""What a module's ``forward`` was before ours: an attribute of the instance, or None for its class's."""


def take_forward(module: nn.Module, ours: Callable[..., Any]) -> None:
    """Gives a module another ``forward``, called as ``ours(module, before, ...)``."""
    module.__dict__["forward"] = partial(ours, module, module.__dict__.get("forward"))


def give_back_forward(module: nn.Module) -> None:
    """Undoes :func:`take_forward`."""
    before = module.__dict__.pop("forward").args[1]
    if before is not None:
        module.__dict__["forward"] = before


def has_forward(module: nn.Module, ours: Callable[..., Any]) -> bool:
    """Whether a module was given this ``forward``."""
    now = module.__dict__.get("forward")
    while isinstance(now, partial):
        if now.func is ours:
            return True
        now = now.args[1] if len(now.args) > 1 else None
    return False


def own_forward(module: nn.Module, before: Forward) -> Callable[..., Any]:
    """A module's own ``forward``."""
    return before if before is not None else type(module).forward.__get__(module)


@dataclass(frozen=True)
class LayerRole:
    """A layer's role, and the state of the unit it belongs to (:class:`~.units.UnitState`)."""

    role: Role
    unit: Any


def linear_forward(self: Any, before: Forward, input: Tensor) -> Tensor:
    """``forward`` of a sharded ``nn.Linear`` or ``Conv1D``."""
    if is_suspended():
        return own_forward(self, before)(input)
    layer: LayerRole = self.lnn_layer
    # in a recomputation, which comes in the backward, no region is open
    tokens = layer.unit.tokens if current_region() is None else None
    axis = layer.unit.axis
    return run_linear(input, self.weight, self.bias, layer.role, axis, transposed=is_conv1d(self), tokens=tokens)


def multihead_forward(self: Any, before: Forward, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a sharded ``nn.MultiheadAttention``: in operations that have rules."""
    if is_suspended() and not getattr(_state, "planning", False):
        return own_forward(self, before)(*args, **kwargs)
    return expanded_forward(self, *args, project=partial(_project, self), **kwargs)


def _project(module: nn.MultiheadAttention, value: Tensor, which: Sections) -> Tensor:
    if not module._qkv_same_embed_dim:
        return project_with(module, value, which)
    return section_linear(value, module.in_proj_weight, module.in_proj_bias, "qkv".index(which), len(which))


def conv1d_forward(self: Any, before: Forward, x: Tensor) -> Tensor:
    """``forward`` of a ``Conv1D`` without flattening its input."""
    if is_suspended() and not getattr(_state, "planning", False):
        return own_forward(self, before)(x)
    return transposed_linear(x, self.weight, self.bias)
