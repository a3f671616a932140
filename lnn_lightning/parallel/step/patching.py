"""Stepping between a caller and a unit, around every hook the unit has.

``nn.Module.__call__`` goes through the attribute ``_call_impl`` of the instance, which runs the hooks and then
``forward``. Patching it on the instance puts us outside all hooks (FSDP's and the user's); ``forward`` is patched too,
for code that calls it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Enter = Callable[[str, nn.Module, Callable[..., Any], Any, Any], Any]
"""``enter(name, unit, original, args, kwargs)`` answers a call of a unit."""

_PATCHED = ("_call_impl", "forward")


@contextmanager
def patched_calls(units: Mapping[str, nn.Module], enter: Enter) -> Iterator[None]:
    """Routes every call of the given modules through ``enter`` and restores them exactly on exit."""
    saved: list[tuple[nn.Module, str, Any]] = []
    missing = object()
    try:
        for name, unit in units.items():
            attributes = _PATCHED if unit._compiled_call_impl is None else (*_PATCHED, "_compiled_call_impl")
            for attribute in attributes:
                saved.append((unit, attribute, unit.__dict__.get(attribute, missing)))
                unit.__dict__[attribute] = _router(name, unit, getattr(unit, attribute), enter)
        yield
    finally:
        for unit, attribute, old in reversed(saved):
            if old is missing:
                unit.__dict__.pop(attribute, None)
            else:
                unit.__dict__[attribute] = old


def _router(name: str, unit: nn.Module, original: Callable[..., Any], enter: Enter) -> Callable[..., Any]:
    def routed(*args: Any, **kwargs: Any) -> Any:
        return enter(name, unit, original, args, kwargs)

    return routed
