"""Stand-ins: parameters that live on another stage, here in name and shape only.

A stand-in is one element expanded to the full shape (stride 0), so it costs no memory, and code in
``configure_optimizers`` that goes through all names works. Its value is NaN: a use by mistake shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

_MARK = "_lnn_stand_in"


def is_stand_in(tensor: Tensor | None) -> bool:
    """Whether the values of this parameter or buffer live elsewhere."""
    return tensor is not None and getattr(tensor, _MARK, False)


def _blank(like: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    dtype = dtype or like.dtype
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device or like.device).expand(like.shape)


def stand_in_for(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A stand-in with the name's shape, dtype and ``requires_grad``; a Parameter for a Parameter."""
    blank = _blank(tensor, device, None)
    result = nn.Parameter(blank, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
    setattr(result, _MARK, True)
    return result


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
        if not is_stand_in(tensor):
            return tensor.to(device=device, dtype=cast)
        blank = _blank(tensor, device, cast)
        setattr(blank, _MARK, True)
        return blank

    return module._apply(convert)
