"""What one call of a sharded unit shares between its layers: values made ready for several of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class Region:
    """One call of a unit.

    Attributes:
        sequence: the token dimension along which values between the unit's layers stay sharded; None: they are whole.
        partial: ``id`` of the whole parameters whose gradients are added up; None: not known, as while planning.
    """

    def __init__(self, sequence: int | None = None, partial: frozenset[int] | None = None) -> None:
        self.sequence, self.partial = sequence, partial
        self.ready: dict[Any, tuple[Tensor, Tensor]] = {}


_current = threading.local()


def current_region() -> Region | None:
    """The call in progress on this thread."""
    return getattr(_current, "region", None)


@contextmanager
def in_region(region: Region | None) -> Iterator[None]:
    """Calls inside belong to the region."""
    before = current_region()
    _current.region = region
    try:
        yield
    finally:
        _current.region = before


def cached(how: Any, value: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` makes of a value, once in a region: several layers that read a value share one collective."""
    region = current_region()
    if region is None:
        return make()
    key = (how, id(value), 0 if value.is_inference() else value._version)  # it may be changed in place in between
    if key not in region.ready:
        region.ready[key] = (value, make())
    return region.ready[key][1]
