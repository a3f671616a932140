"""How sharded layers take the place of the user's: by their class, so that names, state and copies stay.

A linear layer, an attention or a unit gets a subclass of its own class. Parameters that bare functions use
(``F.linear(x, self.weight)``) are recognised by a mode that is on while their unit runs (``calls.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from lnn_lightning.parallel.tensor.axis import TensorAxis
from lnn_lightning.parallel.tensor.calls import section_linear, transposed_linear
from lnn_lightning.parallel.tensor.layers import Role, run_linear
from lnn_lightning.parallel.tensor.multihead import Sections, expanded_forward, project_with

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


def is_suspended() -> bool:
    """Whether :func:`sharding_suspended` is around."""
    return getattr(_state, "suspended", False)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None


@cache
def _subclass(base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    made = type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__})
    type.__setattr__(made, "forward", forward)  # behind what `__init_subclass__` of the base does to forwards
    return made


def take_class(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives a module another ``forward``; ``original_forward`` finds its own."""
    module.__class__ = _subclass(type(module), forward)  # type: ignore[arg-type]


def give_back_class(module: nn.Module) -> None:
    """Undoes :func:`take_class`."""
    module.__class__ = type(module).__bases__[0]


def original_forward(module: nn.Module, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` that a module had before it got ``ours``."""
    kinds = type(module).__mro__
    at = next(index for index, kind in enumerate(kinds) if vars(kind).get("forward") is ours)
    return getattr(super(kinds[at], module), "forward")  # noqa: B009 - of the class behind it


@dataclass(frozen=True)
class LayerRole:
    """A layer's role on the axis of its unit."""

    role: Role
    axis: TensorAxis


def linear_forward(self: Any, input: Tensor) -> Tensor:
    """``forward`` of a sharded ``nn.Linear`` or ``Conv1D``."""
    if is_suspended():
        return original_forward(self, linear_forward)(input)
    layer: LayerRole = self.lnn_layer
    return run_linear(input, self.weight, self.bias, layer.role, layer.axis, transposed=is_conv1d(self))


def multihead_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a sharded ``nn.MultiheadAttention``: in operations that have rules."""
    if is_suspended():
        return original_forward(self, multihead_forward)(*args, **kwargs)
    return expanded_forward(self, *args, project=partial(_project, self), **kwargs)


def _project(module: nn.MultiheadAttention, value: Tensor, which: Sections) -> Tensor:
    if not module._qkv_same_embed_dim:
        return project_with(module, value, which)
    return section_linear(value, module.in_proj_weight, module.in_proj_bias, "qkv".index(which), len(which))


def conv1d_forward(self: Any, x: Tensor) -> Tensor:
    """``forward`` of a ``Conv1D`` without flattening its input."""
    if is_suspended():
        return original_forward(self, conv1d_forward)(x)
    return transposed_linear(x, self.weight, self.bias)
