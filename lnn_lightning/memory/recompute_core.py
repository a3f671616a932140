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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lnn_lightning.memory.recompute_replay import (
    Operation,
    Outside,
    Place,
    Replay,
    View,
    map_arguments,
    results_of,
    unpack,
)
from lnn_lightning.memory.saving import Hooks, Kept, device_of, hooks_around, saving_with
from lnn_lightning.parallel.step.randomness import device_random_as_now, is_random

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


@dataclass
class _Core:
    """What belongs together: a product and what derives from it.

    Attributes:
        softmax: there is one.
        ends: another product follows on it.
        spoiled: something that cannot be run again has changed a value of it.
    """

    softmax: bool = False
    ends: bool = False
    spoiled: bool = False


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
        self._operations: list[Operation] = []
        self._outside: list[tuple[Tensor, int]] = []
        self._places: list[ref[Place]] = []
        self._kept: set[int] = set()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around the block."""
        with saving_with((self._pack, unpack)), self:
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
        given = [leaf for leaf in _tensors(args, kwargs) if _is_plain(leaf)]
        inside = {number for leaf in given if (number := self._number(leaf)) is not None}
        if packet in _PRODUCTS:
            out = func(*args, **kwargs)
            for each in (self._cores[self._core_of[number]] for number in inside):
                each.ends |= each.softmax
            self._cores.append(_Core())
            self._note(func, args, kwargs, given, out, len(self._cores) - 1, None)
            return out
        if not inside:
            return func(*args, **kwargs)
        if packet is None or not _is_cheap(func) or kwargs.get("generator") is not None:
            if packet is None or func._schema.is_mutable:
                self._spoil(inside)
            return func(*args, **kwargs)
        random = device_random_as_now(device_of(given)) if is_random(func) else None
        out = func(*args, **kwargs)
        core = self._joined({self._core_of[number] for number in inside})
        self._cores[core].softmax |= packet in _SOFTMAX
        self._note(func, args, kwargs, given, out, core, random)
        return out

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def _spoil(self, numbers: set[int]) -> None:
        for number in numbers:
            self._cores[self._core_of[number]].spoiled = True

    def _joined(self, cores: set[int]) -> int:
        first, *others = sorted(cores)
        for other in others:
            self._core_of = [first if core == other else core for core in self._core_of]
            for operation in self._operations:
                operation.core = first if operation.core == other else operation.core
            self._cores[first].softmax |= self._cores[other].softmax
            self._cores[first].ends |= self._cores[other].ends
            self._cores[first].spoiled |= self._cores[other].spoiled
            self._cores[other] = _Core()
        return first

    def _note(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any, core: int, random: Any) -> None:
        results = results_of(out)
        addresses = {leaf.untyped_storage()._cdata for leaf in given}
        shared = [leaf for leaf in results if leaf.untyped_storage()._cdata in addresses]
        writes: set[int] = set()
        if func._schema.is_mutable:
            written = [self._number(leaf) for leaf in shared]
            writes = {number for number in written if number is not None}
            if not written or None in written:
                self._spoil(writes)
                return  # it writes into something of the block's own
            for number in writes:
                self._writes[number] += 1
        elif shared:
            return  # a view, which needs no operation
        product = func.overloadpacket in _PRODUCTS
        reads: set[int] = set()
        arguments = map_arguments(lambda leaf: self._argument(leaf, product, reads), (args, kwargs))
        made = [None if writes else self._new(leaf, core) for leaf in results]
        self._operations.append(Operation(func, arguments, reads, writes, made, core, random))

    def _argument(self, leaf: Any, product: bool, reads: set[int]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = None if product else self._number(leaf)
        if number is None:
            self._outside.append((leaf, leaf._version))
            return Outside(len(self._outside) - 1)
        reads.add(number)
        return View(leaf, number)

    def _new(self, tensor: Tensor, core: int) -> int:
        number = len(self._core_of)
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))  # its address is not used again meanwhile
        self._numbers[tensor.untyped_storage()._cdata] = number
        self._core_of.append(core)
        self._writes.append(0)
        return number

    # ---------------------------------------------------------------- what autograd saves

    def _pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # parts of tensor ranks show the shape of the whole
            number = self._number(tensor) if _is_plain(tensor) else None
            if number is not None:
                place = Place(tensor, View(tensor, number), self._writes[number])
                self._places.append(ref(place))
                return place
            if _is_plain(tensor):
                self._kept.add(tensor.untyped_storage()._cdata)
        return Kept(tensor, self._hooks)

    def _decide(self) -> None:
        """At the end of the block: which cores are computed again."""
        places = [place for one in self._places if (place := one()) is not None]
        for index, core in enumerate(self._cores):
            own = [place for place in places if self._core_of[place.view.value] == index]
            replay = self._replay_of(index, own) if core.softmax and core.ends and own else None
            for place in own:
                if replay is None:
                    assert place.tensor is not None
                    place.kept = Kept(place.tensor, self._hooks, place.version)
                else:
                    place.replay = replay
                    replay.places.append(ref(place))
                place.tensor = None
        self._operations, self._outside, self._places, self._storages, self._numbers = [], [], [], [], {}

    def _replay_of(self, core: int, places: list[Place]) -> Replay | None:
        """How a core is computed again; None if that would keep more than it saves, or not give the same."""
        needed = {place.view.value for place in places}
        operations: list[Operation] = []
        for operation in reversed(self._operations):
            if operation.core == core and ({*operation.made} | operation.writes) & needed:
                needed |= operation.reads
                operations.insert(0, operation)
        given: dict[int, tuple[Tensor, int]] = {}

        def note(leaf: Any) -> None:
            if isinstance(leaf, Outside):
                given[leaf.index] = self._outside[leaf.index]

        for operation in operations:
            map_arguments(note, operation.arguments)
        if any(tensor._version != version for tensor, version in given.values()):
            return None
        if any(place.writes != self._writes[place.view.value] for place in places):
            return None  # saved and changed afterwards: an error when backward asks for it
        new = {tensor.untyped_storage()._cdata: tensor for tensor, _ in given.values()}
        cost = sum(_bytes(tensor) for address, tensor in new.items() if address not in self._kept)
        saved = {place.view.value: _bytes(place.tensor) for place in places if place.tensor is not None}
        if self._cores[core].spoiled or cost >= sum(saved.values()):
            return None
        kept = {index: Kept(tensor, self._hooks) for index, (tensor, _) in given.items()}
        self._kept |= new.keys()
        return Replay(operations, kept, places[0].tensor.device)  # type: ignore[union-attr]


def _is_cheap(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func.overloadpacket in _CHEAP or _is_view(func)


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns) and not func._schema.is_mutable


def _is_plain(tensor: Tensor) -> bool:
    """Whether an operation on it is one on its own memory."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
