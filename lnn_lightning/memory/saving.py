"""Tensors kept for backward by hand, the way autograd keeps those it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that is saved for backward, and what unpacks it again."""


def _as_it_is(value: Any) -> Any:
    return value


def hooks_around() -> Hooks:
    """The saved-tensor hooks that are in force here; they see whatever is kept with them."""
    around: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (_as_it_is, _as_it_is) if around is None else around


class Kept:
    """A tensor kept for backward.

    Args:
        tensor: it; must not be changed in place until it is taken out.
        hooks: what packs and unpacks it.
    """

    __slots__ = ("_packed", "_unpack", "_version")

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        pack, self._unpack = hooks
        self._packed = pack(tensor)
        self._version = tensor._version if self._packed is tensor and not tensor.is_inference() else None

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        if self._version is not None and self._packed._version != self._version:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an in-place operation: "
                f"a tensor of shape {tuple(self._packed.shape)} is at version {self._packed._version}; version "
                f"{self._version} was saved. Write `x = x + y` for `x += y` there."
            )
        return self._unpack(self._packed)
