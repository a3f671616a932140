"""Tensors kept for backward by hand, the way autograd keeps those it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.saved import refuses_hooks

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that is saved for backward, and what unpacks it again."""


def _as_it_is(value: Any) -> Any:
    return value


def hooks_around() -> Hooks:
    """The saved-tensor hooks that are in force here; they see whatever is kept with them."""
    around: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (_as_it_is, _as_it_is) if around is None else around


@contextmanager
def saving_with(hooks: Hooks) -> Iterator[None]:
    """Saved-tensor hooks are in force inside.

    Raises:
        StepError: what runs inside cannot run under them.
    """
    try:
        with saved_tensors_hooks(*hooks):
            yield
    except RuntimeError as error:
        if not refuses_hooks(error):
            raise
        raise StepError(
            "The step uses `torch.func` (`grad`, `vjp`, `jacrev` or `hessian`), which torch does not run where what is "
            "saved for backward is kept in another way. Leave out what does that (`recompute`, "
            "`activation_compression`, offloaded activations), or use `torch.autograd.grad`."
        ) from error


class Kept:
    """A tensor kept for backward.

    Args:
        tensor: it; must not be changed in place until it is taken out.
        hooks: what packs and unpacks it.
        version: its version when it was saved, if that was not now.
    """

    __slots__ = ("_learns", "_packed", "_saved", "_unpack", "_version")

    def __init__(self, tensor: Tensor, hooks: Hooks, version: int | None = None) -> None:
        self._version = version_of(tensor)
        self._saved = self._version if version is None else version
        self._learns = tensor.requires_grad
        pack, self._unpack = hooks
        self._packed = pack(tensor)

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        now = version_of(self._packed) if self._unpack is _as_it_is else self._version
        if now != self._saved:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an in-place operation: it "
                f"is at version {now}; version {self._saved} was saved. Write `x = x + y` for `x += y` there."
            )
        value = self._unpack(self._packed)
        # what was packed comes back without a graph, and operations save by whether there is one
        return value if value.requires_grad == self._learns else value.detach().requires_grad_(self._learns)


def version_of(tensor: Tensor) -> int:
    """Counts the changes of a tensor in place."""
    return 0 if tensor.is_inference() else tensor._version


def device_of(tensors: Sequence[Tensor]) -> torch.device:
    """Where an operation on them runs: on the CPU only if all of them lie there."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
