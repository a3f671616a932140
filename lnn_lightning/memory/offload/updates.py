"""Pieces of an optimizer's step: a part of a parameter, with its state read from a store and written back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lnn_lightning.memory.offload.lane import Slot
from lnn_lightning.memory.offload.pages import give_back, trim
from lnn_lightning.memory.offload.places import SMALL, Home, Leaf, flat, in_order_of, part_of
from lnn_lightning.memory.offload.settings import OffloadError
from lnn_lightning.memory.offload.shadow import Changes, Snapshot, step_on
from lnn_lightning.memory.offload.store import Region, Store


@dataclass(eq=False)
class Step:
    """One step of an optimizer, of which the pieces are done now or later.

    Attributes:
        now: the optimizer at its beginning.
        changes: what it changed in each group besides parameters and state.
    """

    now: Snapshot
    changes: dict[int, Changes] = field(default_factory=dict)

    def apply(self, group: int, parameters: list[Tensor], states: list[dict[str, Any]]) -> None:
        """Steps on what is given; counters outside of the state advance once, however many pieces there are."""
        changes = step_on(self.now, group, parameters, states)
        self.changes.setdefault(group, changes)


@dataclass(eq=False)
class PartUpdate:
    """A part of a parameter, or all of it.

    Attributes:
        home: what the store has of the parameter.
        store: the store.
        group: number of the parameter's group.
        start: first element, in the order of memory.
        stop: end of the part.
        cut: the parameter is updated in parts; otherwise as a whole, in its own shape.
        done: called behind the last part with the state that stays in memory.
        step: the step it belongs to; None as long as that has not begun.
        gradient: of the whole parameter; None: there is none, and nothing is done.
        rest: the state in memory before the step: counters and the like.
    """

    home: Home
    store: Store
    group: int
    start: int
    stop: int
    cut: bool
    done: Callable[[Home, dict[str, Any]], None]
    step: Step | None = None
    gradient: Tensor | None = None
    rest: dict[str, Any] = field(default_factory=dict)
    stream: Any = None
    _read: dict[str, Tensor] = field(default_factory=dict)

    @property
    def owner(self) -> int:
        """See :class:`~lnn_lightning.memory.offload.lane.Work`."""
        return id(self.home.parameter)

    def read(self, slot: Slot) -> list[Future[None]]:
        """See :class:`~lnn_lightning.memory.offload.lane.Work`."""
        wanted = dict(self.home.leaves) if self.home.made else {}
        if self.home.values is not None:
            wanted[_VALUES] = self.home.values
        reads = []
        for name, leaf in wanted.items():
            start, buffer = self._room(slot, name, leaf.region)
            if not self.store.in_place:
                reads.append(slot.read(leaf.region, buffer, start))
            self._read[name] = buffer
        return reads

    def update(self, slot: Slot) -> None:
        """See :class:`~lnn_lightning.memory.offload.lane.Work`."""
        if self.gradient is None or self.step is None:
            return
        home = self.home
        state = {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.rest.items()}
        state |= {name: self._seen(home.leaves[name], part) for name, part in self._read.items() if name != _VALUES}
        stored = self._read.get(_VALUES)
        values = self._shaped(flat(home.parameter)[self.start : self.stop] if stored is None else stored)
        gradient = self._shaped(in_order_of(self.gradient, home.parameter)[self.start : self.stop])
        with self._on_cpu(values, gradient, slot) as (here, slope):
            stand_in = nn.Parameter(here)
            stand_in.grad = slope
            self.step.apply(self.group, [stand_in], [state])
        rest = {name: value for name, value in state.items() if not self._keep(slot, name, value, here)}
        if home.values is not None and stored is not None:
            slot.write(home.values.region, stored, self.start)
        if home.updated is not None:
            home.updated(self.start, self.stop, here)
        if self.stop == home.parameter.numel():
            give_back([home.parameter, self.gradient])
            for name in set(home.leaves) - set(state):  # there was room for it, and it was not made
                self.store.free(home.leaves.pop(name).region)
            if not home.made:
                trim()  # what the optimizer made it in is spread over the heap
            self.done(home, rest)

    def _shaped(self, elements: Tensor) -> Tensor:
        parameter = self.home.parameter
        if self.cut:
            return part_of(elements, parameter.dim())
        return elements.as_strided(parameter.shape, parameter.stride())

    def _seen(self, leaf: Leaf, elements: Tensor) -> Tensor:
        return self._shaped(elements) if self.cut else elements.as_strided(leaf.shape, leaf.stride)

    def _room(self, slot: Slot, name: str, region: Region) -> tuple[int, Tensor]:
        """Where this part of a leaf begins, and memory for it: its own, or a buffer."""
        start, stop = (self.start, self.stop) if self.cut else (0, region.numel)
        if self.store.in_place:
            return start, self.store.tensor(region)[start:stop]
        return start, slot.buffer(name, stop - start, region.dtype)

    def _keep(self, slot: Slot, name: str, value: Any, part: Tensor) -> bool:
        """Writes a leaf of the state that the step has changed or made; whether it belongs into the store."""
        home = self.home
        if name not in home.leaves:
            own = isinstance(value, Tensor) and value.shape == part.shape
            if not own and (self.cut or not isinstance(value, Tensor) or value.numel() < SMALL):
                return False
            if home.made and self.cut:
                raise OffloadError(
                    f"{self.step.now.kind.__name__} makes its state {name!r} in a later step than the first, which "  # type: ignore[union-attr]
                    "cannot be done in parts. Leave 'optimizer' out of `Offload(what=...)`."
                )
            like = home.parameter if value.shape == part.shape else value.contiguous()
            region = self.store.allocate(like.numel(), value.dtype)
            home.leaves[name] = Leaf(region, tuple(like.shape), like.stride())
        leaf = home.leaves[name]
        start, buffer = self._room(slot, name, leaf.region)
        target = self._seen(leaf, buffer)
        if value.data_ptr() != target.data_ptr():  # made now, or put in the place of what was read
            target.copy_(value)
        if not self.store.in_place:
            slot.write(leaf.region, buffer, start)
        return True

    def _on_cpu(self, values: Tensor, gradient: Tensor, slot: Slot) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        if values.device.type == "cpu" and gradient.device.type == "cpu":
            return nullcontext((values, gradient))
        return _fetched(values, gradient, slot, self.stream)


_VALUES = " values"
"""No name of a leaf of state."""


@contextmanager
def _fetched(values: Tensor, gradient: Tensor, slot: Slot, stream: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Both copied from a GPU, beside what it computes, and the new values copied back (ZeRO-Offload)."""
    here = []
    with torch.cuda.stream(stream):
        for name, source in (("here", values), ("slope", gradient)):
            made = slot.buffer(f" {name}", source.numel(), source.dtype).as_strided(source.shape, source.stride())
            here.append(made.copy_(source, non_blocking=True))
            if source.device.type != "cpu":
                source.record_stream(stream)
    stream.synchronize()
    yield here[0], here[1]
    with torch.cuda.stream(stream):
        values.copy_(here[0], non_blocking=True)
    stream.synchronize()  # from here on every stream sees the new values, and the buffer may be used again
