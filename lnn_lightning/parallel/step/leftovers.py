"""What a traced run may leave behind in modules and functions: fake tensors in caches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from lnn_lightning.parallel.step.standin import is_stand_in

_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_INTERNAL = {*vars(nn.Module()), "forward", "_call_impl", "_compiled_call_impl"}


@contextmanager
def nothing_left_behind(root: nn.Module) -> Iterator[None]:
    """Puts back attributes and buffers of all sub-modules, and empties function caches that were filled, on exit."""
    attributes = [(module, attributes_of(module)) for module in root.modules()]
    hooks = [(getattr(module, name), getattr(module, name).copy()) for module in root.modules() for name in _HOOKS]
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
        for registered, kept in hooks:  # libraries put some on at the first call, and remember that they did
            if len(registered) != len(kept):
                registered.clear()
                registered.update(kept)
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


def modules_outside(root: nn.Module, without: Collection[nn.Module]) -> Iterator[nn.Module]:
    """All sub-modules but some and what is in them."""
    seen, waiting = {None, *without}, [root]
    while waiting:
        if (module := waiting.pop()) not in seen:
            seen.add(module)
            yield module
            waiting += module._modules.values()  # type: ignore[arg-type]


@contextmanager
def attributes_preserved(root: nn.Module, without: Collection[nn.Module] = ()) -> Iterator[None]:
    """Puts back attributes of all sub-modules on exit, and the items of those that are lists and dicts."""
    attributes = [(module, attributes_of(module)) for module in modules_outside(root, without)]
    try:
        yield
    finally:
        for module, before in attributes:
            _restore_attributes(module, before)


def attributes_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Name -> (object, copy of its items if it is a list or dict)."""
    return {
        name: (value, value.copy() if type(value) in (list, dict) else None)
        for name, value in vars(module).items()
        if name not in _INTERNAL
    }


def plain_attributes(root: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """(Module, name) -> value of those attributes of all sub-modules that hold no tensors: counters and flags."""
    return {
        (module, name): value
        for module in root.modules()
        for name, value in vars(module).items()
        if name not in _INTERNAL and (value is None or type(value) in (bool, int, float, str))
    }


def _restore_attributes(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in _INTERNAL and name not in before]:
        del now[name]
    for name, (value, items) in before.items():
        now[name] = value
        if items is None or _has_items(value, items):
            continue
        value.clear()
        value.extend(items) if isinstance(value, list) else value.update(items)


def _has_items(value: Any, items: Any) -> bool:
    """Whether a list or dict has just these items, the same objects."""
    pairs = ((value, items), (value.values(), items.values())) if isinstance(value, dict) else ((value, items),)
    return len(value) == len(items) and all(a is b for one, other in pairs for a, b in zip(one, other, strict=True))


def _function_caches(root: nn.Module) -> set[Any]:
    """``functools.lru_cache`` functions in the classes of the modules and the Python modules these are written in."""
    bases = {base for module in root.modules() for base in type(module).__mro__}
    classes = [base for base in bases if not base.__module__.startswith("torch.")]
    spaces: list[Any] = [vars(base) for base in classes]
    spaces += [vars(sys.modules[name]) for name in {base.__module__ for base in classes} if name in sys.modules]
    found: set[Any] = set()
    for space in spaces:
        for entry in list(space.values()):
            value = getattr(entry, "__func__", entry)  # of static and class methods
            cells = getattr(value, "__closure__", None) if isinstance(value, FunctionType) else None
            found |= {cell.cell_contents for cell in cells or () if _is_cache(cell)}
            if isinstance(value, functools._lru_cache_wrapper):
                found.add(value)
    return found


def _is_cache(cell: CellType) -> bool:
    """Whether a decorated function keeps a cache in its closure."""
    try:
        return isinstance(cell.cell_contents, functools._lru_cache_wrapper)
    except ValueError:  # an empty cell
        return False
