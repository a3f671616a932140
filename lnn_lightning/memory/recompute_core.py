"""The core of attention, computed again in backward: of all that autograd saves, what grows with the square of length.

Korthikanti et al. 2022 (arXiv 2205.05198), section 5: query times key, softmax, dropout, and dropout's result times
value save ``5as^2b`` of a layer's ``34sbh + 5as^2b`` bytes and cost few operations. The core is found by its structure
while a block runs: what derives from a batched matrix product by elementwise operations and a softmax, and ends in
another batched product. Its operations are noted; where autograd saves a result of them, nothing but its number is
kept, and the first one that backward asks for makes them run again, from the tensors that the first product saved
anyway. Torch's selective policy for ``checkpoint`` would keep the results of all other operations, also of those that
autograd saves nothing of, and go through the whole block once more.

Fused kernels (``scaled_dot_product_attention`` as flash, efficient or cudnn) save no more than query, key, value, their
result and a number a row; there is nothing to gain, and they are left alone. Its decomposed form, which is taken for
dropout on the CPU, is found like one written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lnn_lightning.memory.saving import Hooks, Kept, hooks_around
from lnn_lightning.parallel.step.randomness import is_random

_aten = torch.ops.aten
_PRODUCTS = {_aten.bmm, _aten.baddbmm}
_SOFTMAX = {_aten._softmax, _aten._safe_softmax, _aten._masked_softmax}
_CHEAP = _SOFTMAX | {
    _aten.native_dropout,
    _aten.bernoulli_,
    _aten.bernoulli,
    _aten.rand_like,
    _aten.empty_like,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten._to_copy,
    _aten.clone,
    _aten.copy_,
    _aten.where,
    _aten.masked_fill,
    _aten.masked_fill_,
    _aten.cat,
    _aten.constant_pad_nd,
    _aten.amax,
    _aten.sum,
    _aten.tril,
    _aten.triu,
    _aten.tril_,
    _aten.triu_,
}
"""What may lie between the products, besides elementwise operations and views."""
_PLAIN = (Tensor, torch.nn.Parameter)


class _View:
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


class _Outside:
    """A tensor that the core is given, by its number."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass
class _Operation:
    func: Any
    arguments: Any
    reads: set[int]
    writes: set[int]
    made: list[int | None]
    core: int
    random: Callable[[], None] | None = None


@dataclass
class _Core:
    """What belongs together: a product and what derives from it."""

    softmax: bool = False
    ends: bool = False


class _Place:
    """Stands in a node of the graph for a tensor it saved; decides at the end of the block what it keeps."""

    __slots__ = ("__weakref__", "kept", "replay", "tensor", "version", "view")

    def __init__(self, tensor: Tensor, view: _View, version: int) -> None:
        self.tensor: Tensor | None = tensor
        self.view, self.version = view, version
        self.kept: Kept | None = None
        self.replay: _Replay | None = None


class CoreWatch(TorchDispatchMode):
    """Follows a block's operations and what autograd saves of them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._hooks: Hooks = hooks_around()
        self._numbers: dict[int, int] = {}
        self._storages: list[StorageWeakRef] = []
        self._core_of: list[int] = []
        self._writes: list[int] = []
        self._cores: list[_Core] = []
        self._operations: list[_Operation] = []
        self._outside: list[tuple[Tensor, int]] = []
        self._places: list[ref[_Place]] = []
        self._kept: set[int] = set()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around the block."""
        with saved_tensors_hooks(self._pack, _unpack), self:
            yield
        self._decide()

    @property
    def found(self) -> bool:
        """Whether there was a core."""
        return any(core.softmax and core.ends for core in self._cores)

    # ---------------------------------------------------------------- while the block runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else None
        if not self._numbers and packet not in _PRODUCTS:
            return func(*args, **kwargs)
        given = [leaf for leaf in _tensors(args, kwargs) if type(leaf) in _PLAIN]
        inside = {number for leaf in given if (number := self._number(leaf)) is not None}
        if packet in _PRODUCTS:
            out = func(*args, **kwargs)
            for each in (self._cores[self._core_of[number]] for number in inside):
                each.ends |= each.softmax
            self._cores.append(_Core())
            self._note(func, args, kwargs, given, out, len(self._cores) - 1, None)
            return out
        if not inside or packet is None or not _is_cheap(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        random = _random_as_now(given[0].device) if is_random(func) else None
        out = func(*args, **kwargs)
        core = self._joined({self._core_of[number] for number in inside})
        self._cores[core].softmax |= packet in _SOFTMAX
        self._note(func, args, kwargs, given, out, core, random)
        return out

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def _joined(self, cores: set[int]) -> int:
        first, *others = sorted(cores)
        for other in others:
            self._core_of = [first if core == other else core for core in self._core_of]
            for operation in self._operations:
                operation.core = first if operation.core == other else operation.core
            self._cores[first].softmax |= self._cores[other].softmax
            self._cores[first].ends |= self._cores[other].ends
            self._cores[other] = _Core()
        return first

    def _note(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any, core: int, random: Any) -> None:
        results = _results(out)
        addresses = {leaf.untyped_storage()._cdata for leaf in given}
        shared = [leaf for leaf in results if leaf.untyped_storage()._cdata in addresses]
        writes: set[int] = set()
        if func._schema.is_mutable:
            written = [self._number(leaf) for leaf in shared]
            if not written or None in written:
                return  # it writes into something of the block's own
            writes = {number for number in written if number is not None}
            for number in writes:
                self._writes[number] += 1
        elif shared:
            return  # a view, which needs no operation
        product = func.overloadpacket in _PRODUCTS
        reads: set[int] = set()
        arguments = _map(lambda leaf: self._argument(leaf, product, reads), (args, kwargs))
        made = [None if writes else self._new(leaf, core) for leaf in results]
        self._operations.append(_Operation(func, arguments, reads, writes, made, core, random))

    def _argument(self, leaf: Any, product: bool, reads: set[int]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = None if product else self._number(leaf)
        if number is None:
            self._outside.append((leaf, leaf._version))
            return _Outside(len(self._outside) - 1)
        reads.add(number)
        return _View(leaf, number)

    def _new(self, tensor: Tensor, core: int) -> int:
        number = len(self._core_of)
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))  # its address is not used again meanwhile
        self._numbers[tensor.untyped_storage()._cdata] = number
        self._core_of.append(core)
        self._writes.append(0)
        return number

    # ---------------------------------------------------------------- what autograd saves

    def _pack(self, tensor: Tensor) -> Any:
        number = self._number(tensor) if type(tensor) in _PLAIN else None
        if number is None:
            if type(tensor) in _PLAIN:
                self._kept.add(tensor.untyped_storage()._cdata)
            return Kept(tensor, self._hooks)
        place = _Place(tensor, _View(tensor, number), self._writes[number])
        self._places.append(ref(place))
        return place

    def _decide(self) -> None:
        """At the end of the block: which cores are computed again."""
        places = [place for one in self._places if (place := one()) is not None]
        for index, core in enumerate(self._cores):
            own = [place for place in places if self._core_of[place.view.value] == index]
            replay = self._replay_of(index, own) if core.softmax and core.ends and own else None
            for place in own:
                if replay is None:
                    assert place.tensor is not None
                    place.kept = Kept(place.tensor, self._hooks)
                else:
                    place.replay = replay
                    replay.places.append(ref(place))
                place.tensor = None
        self._operations, self._outside, self._places, self._storages, self._numbers = [], [], [], [], {}

    def _replay_of(self, core: int, places: list[_Place]) -> _Replay | None:
        """How a core is computed again; None if that would keep more than it saves, or not give the same."""
        needed = {place.view.value for place in places}
        operations: list[_Operation] = []
        for operation in reversed(self._operations):
            if operation.core == core and ({*operation.made} | operation.writes) & needed:
                needed |= operation.reads
                operations.insert(0, operation)
        outside: set[int] = set()
        for operation in operations:
            _map(lambda leaf: outside.add(leaf.index) if isinstance(leaf, _Outside) else None, operation.arguments)
        given = {index: self._outside[index] for index in outside}
        if any(tensor._version != version for tensor, version in given.values()):
            return None
        if any(place.version != self._writes[place.view.value] for place in places):
            return None  # saved and changed afterwards: an error, for autograd to find
        new = {tensor.untyped_storage()._cdata: tensor for tensor, _ in given.values()}
        cost = sum(_bytes(tensor) for address, tensor in new.items() if address not in self._kept)
        saved = {place.view.value: _bytes(place.tensor) for place in places if place.tensor is not None}
        if cost >= sum(saved.values()):
            return None
        kept = {index: Kept(tensor, self._hooks) for index, (tensor, _) in given.items()}
        self._kept |= new.keys()
        return _Replay(operations, kept)


@dataclass
class _Replay:
    """A core's operations, to be run again."""

    operations: list[_Operation]
    outside: dict[int, Kept]
    places: list[ref[_Place]] = field(default_factory=list)
    values: WeakKeyDictionary[_Place, Tensor] = field(default_factory=WeakKeyDictionary)

    def take(self, place: _Place) -> Tensor:
        """The tensor that belongs to a place; what is not asked for again is not held any longer."""
        if place not in self.values:
            self._run()
        return self.values.pop(place)

    def _run(self) -> None:
        places = [place for one in self.places if (place := one()) is not None]
        outside = {index: kept.get() for index, kept in self.outside.items()}
        device = next(iter(outside.values())).device
        last = {number: index for index, one in enumerate(self.operations) for number in one.reads | one.writes}
        needed = {place.view.value for place in places}
        memory: dict[int, Tensor] = {}
        draws = any(one.random is not None for one in self.operations)
        put_back = _random_as_now(device) if draws else None

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, _Outside):
                return outside[leaf.index]
            return leaf.of(memory[leaf.value]) if isinstance(leaf, _View) else leaf

        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for index, operation in enumerate(self.operations):
                if operation.random is not None:
                    operation.random()
                args, kwargs = _map(argument, operation.arguments)
                out = operation.func(*args, **kwargs)
                made = zip(operation.made, _results(out), strict=True)
                memory |= {number: leaf for number, leaf in made if number is not None}
                for number in [number for number in memory if last.get(number, -1) <= index and number not in needed]:
                    del memory[number]
        if put_back is not None:
            put_back()
        for place in places:
            self.values[place] = place.view.of(memory[place.view.value])


def _unpack(place: Any) -> Tensor:
    if isinstance(place, Kept):
        return place.get()
    if place.replay is not None:
        return place.replay.take(place)
    return place.tensor if place.kept is None else place.kept.get()  # a derivative taken within the block itself


def _is_cheap(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _CHEAP or _is_view(func)


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns) and not func._schema.is_mutable


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))


def _map(function: Callable[[Any], Any], arguments: Any) -> Any:
    """The arguments of an operator with every one of them replaced."""
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([_map(function, each) for each in arguments])
    if isinstance(arguments, dict):
        return {name: _map(function, each) for name, each in arguments.items()}
    return function(arguments)


def _results(out: Any) -> list[Tensor]:
    return [leaf for leaf in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _random_as_now(device: torch.device) -> Callable[[], None]:
    """Makes a function that puts the device's generator into the state of now."""
    if device.type == "cpu":
        state = torch.get_rng_state()
        return lambda: torch.set_rng_state(state)
    module = torch.get_device_module(device.type)
    state = module.get_rng_state(device)
    return lambda: module.set_rng_state(state, device)
