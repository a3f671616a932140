"""Operations noted while they ran, to be run again for the tensors that backward asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from lnn_lightning.memory.saving import Kept, version_of
from lnn_lightning.parallel.step.randomness import device_random_as_now


class View:
    """A tensor within the core: a memory by its number, and how it is looked at."""

    __slots__ = ("offset", "size", "stride", "value")

    def __init__(self, tensor: Tensor, value: int) -> None:
        self.value, self.offset = value, tensor.storage_offset()
        self.size, self.stride = tuple(tensor.shape), tensor.stride()

    def of(self, memory: Tensor) -> Tensor:
        """The same view of another memory."""
        if (tuple(memory.shape), memory.stride(), memory.storage_offset()) == (self.size, self.stride, self.offset):
            return memory
        return memory.as_strided(self.size, self.stride, self.offset)


class Outside:
    """A tensor that the core is given, by its number."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass
class Operation:
    """An operation within the core.

    Attributes:
        func: the operator.
        arguments: its ``(args, kwargs)``, with :class:`View` and :class:`Outside` for tensors.
        reads: values that it reads.
        writes: values that it changes in place.
        made: values that its results are; None for one that it was given.
        core: number of the core it belongs to.
        random: puts the generator into the state it drew from.
    """

    func: Any
    arguments: Any
    reads: set[int]
    writes: set[int]
    made: list[int | None]
    core: int
    random: Callable[[], None] | None = None


class Place:
    """Stands in a node of the graph for a tensor it saved; decides at the end of the block what it keeps."""

    __slots__ = ("__weakref__", "kept", "replay", "tensor", "version", "view", "writes")

    def __init__(self, tensor: Tensor, view: View, writes: int) -> None:
        self.tensor: Tensor | None = tensor
        self.view, self.writes, self.version = view, writes, version_of(tensor)
        self.kept: Kept | None = None
        self.replay: Replay | None = None


@dataclass
class Replay:
    """A core's operations, to be run again."""

    operations: list[Operation]
    outside: dict[int, Kept]
    device: torch.device
    places: list[ref[Place]] = field(default_factory=list)
    values: WeakKeyDictionary[Place, Tensor] = field(default_factory=WeakKeyDictionary)

    def take(self, place: Place) -> Tensor:
        """The tensor that belongs to a place; what is not asked for again is not held any longer."""
        if place not in self.values:
            self._run()
        return self.values.pop(place)

    def _run(self) -> None:
        places = [place for one in self.places if (place := one()) is not None]
        outside = {index: kept.get() for index, kept in self.outside.items()}
        last = {number: index for index, one in enumerate(self.operations) for number in one.reads | one.writes}
        needed = {place.view.value for place in places}
        memory: dict[int, Tensor] = {}
        draws = any(one.random is not None for one in self.operations)
        put_back = device_random_as_now(self.device) if draws else _nothing

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Outside):
                return outside[leaf.index]
            return leaf.of(memory[leaf.value]) if isinstance(leaf, View) else leaf

        try:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                for index, operation in enumerate(self.operations):
                    if operation.random is not None:
                        operation.random()
                    args, kwargs = map_arguments(argument, operation.arguments)
                    made = zip(operation.made, results_of(operation.func(*args, **kwargs)), strict=True)
                    memory |= {number: leaf for number, leaf in made if number is not None}
                    for number in [n for n in memory if last.get(n, -1) <= index and n not in needed]:
                        del memory[number]
        finally:
            put_back()
        for place in places:
            self.values[place] = place.view.of(memory[place.view.value])


def unpack(place: Any) -> Tensor:
    """What autograd asks for."""
    if isinstance(place, Kept):
        return place.get()
    if place.replay is not None:
        return place.replay.take(place)
    return place.tensor if place.kept is None else place.kept.get()  # a derivative taken within the block itself


def _nothing() -> None:
    pass


def map_arguments(function: Callable[[Any], Any], arguments: Any) -> Any:
    """The arguments of an operator with every one of them replaced."""
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([map_arguments(function, each) for each in arguments])
    if isinstance(arguments, dict):
        return {name: map_arguments(function, each) for name, each in arguments.items()}
    return function(arguments)


def results_of(out: Any) -> list[Tensor]:
    """The tensors among the results of an operator."""
    return [leaf for leaf in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(leaf, Tensor)]
