"""Tensors that autograd keeps for the backward, kept another way: encoded, or somewhere else, or both.

Torch applies the innermost ``saved_tensors_hooks`` only, so this is the one place that enters them. What is saved is
first offered to the encoders, then what they made (or the values as they are) goes to the keeper. Inside a recomputed
block the hooks of the recomputation take the place of these; the block's inputs are saved under these.

Memory is what counts, not tensors: several saved tensors that are views of one memory, or one tensor saved by several
operations, are stored once. A stored memory lives as long as autograd refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from lnn_lightning.memory.report import Report
from lnn_lightning.memory.saving import saving_with
from lnn_lightning.parallel.step.extension import StepExtension

Microbatch = tuple[int, int]
"""Stage and number of a micro-batch."""
Pack = Callable[[Tensor], Any]
"""Makes an object with a method ``unpack`` of a saved tensor; None: does not know it."""
SMALLEST = 1024
"""Tensors of fewer bytes are left as they are."""
AS_IT_IS = "as it is"
_SAME_VALUES = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0"}
"""Operations between a parameter and what autocast and matrix products save of it."""


class Keeper(Protocol):
    """Where packed tensors stay until the backward needs them."""

    def put(self, tensor: Tensor, microbatch: Microbatch) -> Any:
        """Takes a tensor that nobody changes any more; returns a token. Dropping the token frees what it stands for."""

    def get(self, token: Any) -> Tensor:
        """The tensor: same values, dtype, device and strides. May be called more than once."""


@dataclass
class Encoded:
    """What an encoder made of a tensor.

    Attributes:
        name: name of the encoding, for the report.
        tensors: what is kept.
        decode: makes those elements, in one dimension again, of what was kept; None: the one tensor is them.
    """

    name: str
    tensors: list[Tensor]
    decode: Callable[[list[Tensor]], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(each.numel() * each.element_size() for each in self.tensors)


class Encoder(Protocol):
    """How saved tensors are packed."""

    def encode(self, tensor: Tensor, saved: Saved) -> Encoded | None:
        """Encodes the memory of a saved tensor, or the part of it that the tensor takes up.

        Args:
            tensor: the elements of that memory in one dimension, in the order in which they lie there.
            saved: what memory it is.

        Returns:
            None if this encoder has nothing for it.
        """


@dataclass(frozen=True)
class Saved:
    """What an encoder may ask about a tensor that is being saved.

    Attributes:
        storage: identity of its memory.
        version: how often the memory was changed before.
        whole: whether it is all of the memory, not a part.
        requires_grad: whether it is part of the graph: an activation, neither data nor statistics.
    """

    storage: int
    version: int
    whole: bool
    requires_grad: bool


class StoredMemory:
    """A stored memory; freed when nothing refers to it any more.

    Args:
        name: name of the encoding.
        tokens: what is stored.
        keeper: where; None: the tokens are the tensors.
        decode: as in :class:`Encoded`; None: the one tensor is the value.
        source: the memory it was made from, whose identity is not used again as long as this lives.
    """

    def __init__(
        self,
        name: str,
        tokens: list[Any],
        keeper: Keeper | None,
        decode: Callable[[list[Tensor]], Tensor] | None,
        source: StorageWeakRef,
    ) -> None:
        self.name = name
        self._tokens, self._keeper, self._decode, self._source = tokens, keeper, decode, source

    def get(self) -> Tensor:
        """The values."""
        tensors = self._tokens if self._keeper is None else [self._keeper.get(token) for token in self._tokens]
        return tensors[0] if self._decode is None else self._decode(list(tensors))

    @property
    def moved(self) -> bool:
        """Whether the memory itself need not stay."""
        return self._decode is not None or self._keeper is not None


class Packed:
    """What autograd holds in place of a saved tensor. Changes in place of the tensor are noticed as autograd does.

    Args:
        tensor: the saved tensor.
        kept: where its values are; None: they stay where they are.
        at: shape, strides and offset of the tensor in the kept memory; None: it is all of it.
    """

    def __init__(self, tensor: Tensor, kept: StoredMemory | None, at: tuple[Any, Any, int] | None = None) -> None:
        self.kept, self.at = kept, at
        self.version = None if tensor.is_inference() else tensor._version
        self.shape, self.dtype = tensor.shape, tensor.dtype
        # A tensor saved by its own node must not hold on to that node. Of leaves autograd keeps the tensor itself too:
        # what it is at the time of the backward counts.
        self.probe = tensor if kept is None and tensor.is_leaf else tensor.detach()
        if kept is not None and kept.moved:
            self.probe.data = tensor.new_empty(0)  # goes on counting the changes, without the memory

    def unpack(self) -> Tensor:
        """The saved tensor.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if self.version is not None and self.probe._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.shape)}, {self.dtype}, is at version {self.probe._version}; expected "
                f"version {self.version} instead. It was changed after an operation saved it for its backward: change "
                "a clone, or use the operation that is not in place."
            )
        if self.kept is None:
            return self.probe
        value = self.kept.get()
        if self.at is None:
            return value
        shape, stride, offset = self.at
        return value.as_strided(shape, stride, value.storage_offset() + offset)


class SavedTensors(StepExtension):
    """Keeps saved tensors encoded or elsewhere while the stages' forwards run.

    Parameters, leaves that learn (values received from another stage) and what is small stay where they are: their
    memory is in use anyway.

    Args:
        skipped: tells tensors whose memory is in use anyway, besides those.
        encoders: how to pack; the first one that takes a tensor has it.
        keeper: where what is packed stays; None: where it is.
        smallest: tensors of fewer bytes are left as they are; None: of fewer than :data:`SMALLEST`.
    """

    def __init__(
        self,
        skipped: Callable[[Tensor], bool] = lambda tensor: False,
        encoders: Sequence[Encoder] = (),
        keeper: Keeper | None = None,
        smallest: int | None = None,
    ) -> None:
        self._skipped, self._encoders, self._keeper = skipped, encoders, keeper
        self.smallest = SMALLEST if smallest is None else smallest
        self._kept: WeakValueDictionary[tuple[Any, ...], StoredMemory] = WeakValueDictionary()
        self._microbatch: Microbatch = (0, 0)
        self._hooks = (self._pack, self._unpack)
        self._operation: Pack | None = None
        self.report: Report | None = None
        """Set to a report: counts what is saved from then on."""

    @override
    @contextmanager
    def forward(self, stage: int, index: int) -> Iterator[None]:
        before, self._microbatch = self._microbatch, (stage, index)
        try:
            with saving_with(self._hooks):
                yield
        finally:
            self._microbatch = before

    def active(self) -> bool:
        """Whether what is saved now comes here: no other hooks were entered since."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] is self._hooks[0]

    @contextmanager
    def packing(self, pack: Pack) -> Iterator[None]:
        """What an operation run inside saves is first offered to a function that knows the operation."""
        before, self._operation = self._operation, pack
        try:
            yield
        finally:
            self._operation = before

    def keep(self, tensor: Tensor, encoded: Encoded) -> StoredMemory:
        """Keeps what was made of the whole memory of a tensor; not known to :meth:`find`."""
        if self.report is not None:
            self.report.add(encoded.name, tensor, encoded.nbytes)
        return self._made(tensor, encoded)

    def hold(self, tensor: Tensor) -> Packed:
        """What autograd would hold if an operation saved the tensor now."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return self._hold(tensor)

    def find(self, tensor: Tensor) -> StoredMemory | None:
        """What the memory of a tensor is kept as, if it was saved whole and is still kept."""
        return self._kept.get((tensor.untyped_storage()._cdata, tensor._version, tensor.dtype))

    # ---------------------------------------------------------------- hooks

    def _pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if self._operation is not None and (packed := self._operation(tensor)) is not None:
                return packed
            return self._hold(tensor)

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return packed.unpack()

    def _hold(self, tensor: Tensor) -> Packed:
        if self._stays(tensor):
            return Packed(tensor, None)
        size, storage = tensor.element_size(), tensor.untyped_storage()
        start, length = int(tensor.storage_offset()), _extent(tensor)
        whole = storage.nbytes() % size == 0 and (2 * length * size > storage.nbytes() or self.find(tensor) is not None)
        if whole:
            start, length = 0, storage.nbytes() // size
        kept = self._keep(tensor, start, length, whole)
        return Packed(tensor, kept, (tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start))

    def _stays(self, tensor: Tensor) -> bool:
        return (
            tensor.layout is not torch.strided
            or tensor.is_inference()
            or isinstance(tensor, FakeTensor)
            or tensor.is_meta
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.numel() * tensor.element_size() < self.smallest
            or _is_parameter(tensor)
            or self._skipped(tensor)
            or is_traceable_wrapper_subclass(tensor)
        )

    def _keep(self, tensor: Tensor, start: int, length: int, whole: bool) -> StoredMemory:
        """Keeps a stretch of a tensor's memory: all of it, or if the tensor takes up a small part only that."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.dtype, *(() if whole else (start, length)))
        if (kept := self._kept.get(key)) is None:
            values = tensor.detach().as_strided((length,), (1,), start)
            encoded = self._encode(values, Saved(storage._cdata, tensor._version, whole, tensor.requires_grad))
            if self.report is not None:
                before = None if whole else length * values.element_size()
                self.report.add(encoded.name, tensor, encoded.nbytes, before)
            kept = self._kept[key] = self._made(tensor, encoded)
        return kept

    def _made(self, tensor: Tensor, encoded: Encoded) -> StoredMemory:
        tokens: list[Any] = encoded.tensors
        if self._keeper is not None:
            tokens = [self._keeper.put(each, self._microbatch) for each in tokens]
        return StoredMemory(
            encoded.name, tokens, self._keeper, encoded.decode, StorageWeakRef(tensor.untyped_storage())
        )

    def _encode(self, values: Tensor, saved: Saved) -> Encoded:
        for encoder in self._encoders:
            if (encoded := encoder.encode(values, saved)) is not None:
                return encoded
        return Encoded(AS_IT_IS, [values])


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last of a tensor in its memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_parameter(tensor: Tensor) -> bool:
    """Whether it is a leaf that learns, a view of one or of a parameter, or a parameter cast by autocast."""
    source = tensor._base if tensor._base is not None else tensor
    if isinstance(source, nn.Parameter) or (source.is_leaf and source.requires_grad):
        return True
    node: Any = source.grad_fn
    while node is not None and type(node).__name__ in _SAME_VALUES:  # `name` may be an attribute of the user's
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)
