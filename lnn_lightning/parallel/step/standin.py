"""Stand-ins: parameters that live on another stage, here in name and shape only.

A stand-in is one element expanded to the full shape (stride 0), so it costs no memory, and code in
``configure_optimizers`` that goes through all names works. Reading it gives NaN: a use by mistake shows. Writing to it
does nothing: code that changes all parameters (weight clipping, averages of weights) works on those that are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PASSED_ON = {"requires_grad_", "detach_", "__set__"}


class _StandIn:
    """Ignores writes; everything else is what the expanded tensor does, with plain results."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init names it
        if isinstance(target, _StandIn):
            if name == "detach" or (name == "__get__" and getattr(func, "__self__", None) is Tensor.data):
                return target  # so that `p.data.clamp_()` is a write to a stand-in too
            writes = name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__iadd__", "__imul__")
            if writes and name not in _PASSED_ON:
                return target
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = stand_in_for(self)  # type: ignore[arg-type]
        return copy


class StandInParameter(_StandIn, nn.Parameter):
    """A parameter that lives elsewhere."""


class StandInBuffer(_StandIn, nn.Parameter):
    """A buffer that lives elsewhere; a Parameter only because fake tensors know no other subclass."""


def is_stand_in(tensor: Tensor | None) -> bool:
    """Whether the values of this parameter or buffer live elsewhere."""
    return isinstance(tensor, _StandIn)


def _blank(like: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    dtype = dtype or like.dtype
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device or like.device).expand(like.shape)


def stand_in_for(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A stand-in with the shape, dtype and ``requires_grad`` of a tensor; a Parameter for a Parameter."""
    blank = _blank(tensor, device, dtype)
    is_parameter = isinstance(tensor, nn.Parameter) and not isinstance(tensor, StandInBuffer)
    kind = StandInParameter if is_parameter else StandInBuffer
    return torch.Tensor._make_subclass(kind, blank, tensor.requires_grad)


def replace_tensors(module: nn.Module, decide: Callable[[str, Tensor], Tensor]) -> None:
    """Replaces parameters and buffers in place; a tensor with several names is decided once, by its first name."""
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, child in module.named_modules(remove_duplicate=True):
        for store in (child._parameters, child._buffers):
            for name, tensor in list(store.items()):
                if tensor is None:
                    continue
                if id(tensor) not in done:
                    done[id(tensor)] = (tensor, decide(f"{prefix}.{name}" if prefix else name, tensor))
                store[name] = done[id(tensor)][1]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by their first names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def has_stand_ins(module: nn.Module) -> bool:
    """Whether any parameter or buffer of the module lives elsewhere."""
    return any(is_stand_in(tensor) for _, tensor in named_tensors(module))


def convert_module(
    module: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """``module.to(device, dtype)`` that leaves stand-ins without memory. Only floating-point tensors change dtype."""

    def convert(tensor: Tensor) -> Tensor:
        cast = dtype if tensor.is_floating_point() else None
        if is_stand_in(tensor):
            if isinstance(tensor, StandInParameter):  # its `data` is set to this, the object stays
                return _blank(tensor, device, cast)
            return stand_in_for(tensor, device, cast)
        return tensor.to(device=device, dtype=cast)

    def stays(tensor: Tensor) -> bool:
        cast = dtype if tensor.is_floating_point() else None
        return (device is None or tensor.device == device) and (cast is None or tensor.dtype == cast)

    # sharded parameters can be moved, but not while others refer to them
    return module if all(stays(tensor) for _, tensor in named_tensors(module)) else module._apply(convert)
