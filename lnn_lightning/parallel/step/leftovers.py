"""What a traced run may leave behind in modules and functions: fake tensors in caches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lnn_lightning.parallel.step.standin import is_stand_in

_INTERNAL = {*vars(nn.Module()), "forward", "_call_impl", "_compiled_call_impl"}


@contextmanager
def nothing_left_behind(root: nn.Module) -> Iterator[None]:
    """Puts back attributes and buffers of all sub-modules, and empties function caches that were filled, on exit."""
    attributes = [(module, _attributes(module)) for module in root.modules()]
    buffers = [(module, dict(module._buffers)) for module in root.modules() if module._buffers]
    values = {
        id(tensor): (tensor, tensor._version, tensor.clone())
        for _, store in buffers
        for tensor in store.values()
        if tensor is not None and not is_stand_in(tensor) and not tensor.is_inference()
    }
    caches = {cache: cache.cache_info().currsize for cache in _function_caches(root)}
    try:
        yield
    finally:
        for module, before in attributes:
            _restore_attributes(module, before)
        for module, store in buffers:
            module._buffers.clear()
            module._buffers.update(store)
        for tensor, version, copy in values.values():
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)
        for cache, size in caches.items():
            if cache.cache_info().currsize != size:
                cache.cache_clear()


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Name -> (object, copy of its items if it is a list or dict)."""
    return {
        name: (value, value.copy() if type(value) in (list, dict) else None)
        for name, value in vars(module).items()
        if name not in _INTERNAL
    }


def _restore_attributes(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in _INTERNAL and name not in before]:
        del now[name]
    for name, (value, items) in before.items():
        now[name] = value
        if items is None or (len(items) == len(value) and all(a is b for a, b in zip(items, value, strict=True))):
            continue
        value.clear()
        value.extend(items) if isinstance(value, list) else value.update(items)


def _function_caches(root: nn.Module) -> set[Any]:
    """``functools.lru_cache`` functions of the classes of the modules, and of the Python modules these are written in."""
    classes = {
        base for module in root.modules() for base in type(module).__mro__ if not base.__module__.startswith("torch.")
    }
    spaces: list[Any] = [vars(kind) for kind in classes]
    spaces += [vars(sys.modules[name]) for name in {kind.__module__ for kind in classes} if name in sys.modules]
    kind = functools._lru_cache_wrapper
    return {value for space in spaces for value in list(space.values()) if isinstance(value, kind)}
