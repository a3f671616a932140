"""Small things the ranks of one group tell each other: a result of a step, an error, whether they hold the same batch.

A result has the same skeleton in every step (keys, texts, shapes) and other numbers. So a tree is pickled with its
tensors and numbers taken out; the skeleton that is left crosses once and is then known by its digest.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup

from lnn_lightning.parallel.errors import AbsentValueError, ParallelError
from lnn_lightning.parallel.step.tree import children_of

_T = TypeVar("_T")
_EXACT_INT = 2**53
_KNOWN_SKELETONS = 256
_KNOWN_BYTES = 1 << 16
_FAILED = -1
_PACKED_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
}


class RemoteError(ParallelError):
    """Another rank failed where this one did not."""


class UnequalBatchError(ParallelError):
    """Ranks that must work on one batch were given different ones."""


# ------------------------------------------------------------------------------------------------ trees


@dataclass
class _Content:
    """What was taken out of a tree, in the order of its places in the skeleton."""

    numbers: list[float] = field(default_factory=list)
    scalars: dict[int, Tensor] = field(default_factory=dict)  # place among the numbers -> 0-d tensor
    tensors: list[Tensor] = field(default_factory=list)


class _Extractor(pickle.Pickler):
    """Pickles a tree with a mark for each tensor and number; the marks are texts, as numbers would be taken out too."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.content = _Content()

    def persistent_id(self, obj: Any) -> str | None:
        kind = type(obj)
        if kind is float:
            return self._number("f", obj)
        if kind is int:
            return self._number("i", obj) if -_EXACT_INT <= obj <= _EXACT_INT else None
        if kind is bool:
            return self._number("b", obj)
        if not isinstance(obj, Tensor):
            return None
        if isinstance(obj, FakeTensor):
            raise AbsentValueError(
                f"A result of the step contains an absent value of shape {tuple(obj.shape)}: it was made on another "
                "stage and is returned, kept or logged here. Compute it from values of the last stage."
            )
        if obj.is_meta or obj.layout != torch.strided or obj.is_quantized:
            return None
        obj = obj.detach()
        on_cpu = obj.device.type == "cpu"
        if obj.dim() == 0 and (obj.dtype in _PACKED_DTYPES or (on_cpu and _small(obj))):
            mark = str(obj.dtype).removeprefix("torch.")
            if on_cpu:
                return self._number(f"c{mark}", obj.item())
            self.content.scalars[len(self.content.numbers)] = obj
            return self._number(f"s{mark}", 0.0)
        self.content.tensors.append(obj)
        return "h" if on_cpu else "t"

    def _number(self, mark: str, value: float) -> str:
        self.content.numbers.append(float(value))
        return mark


class _Inserter(pickle.Unpickler):
    """Puts numbers and tensors back; marks come in the order they were written."""

    def __init__(self, skeleton: bytes, numbers: Tensor | None, tensors: Iterator[Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._packed, self._tensors = numbers, tensors
        self._numbers: list[float] | None = None
        self._place = -1

    def persistent_load(self, mark: str) -> Any:
        if mark in ("t", "h"):
            tensor = next(self._tensors)
            return tensor if mark == "t" else tensor.cpu()
        self._place += 1
        assert self._packed is not None
        if mark[0] == "s":
            return self._packed[self._place].to(getattr(torch, mark[1:]), copy=True)
        if self._numbers is None:
            self._numbers = self._packed.tolist()
        value = self._numbers[self._place]
        if mark[0] == "c":
            return torch.tensor(value, dtype=getattr(torch, mark[1:]))
        return {"f": float, "i": int, "b": bool}[mark](value)


@dataclass(frozen=True)
class _Skeleton:
    """A tree without its numbers and tensors, and what must be received to fill it."""

    pickled: bytes
    numbers: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def _small(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int64 and -_EXACT_INT <= tensor.item() <= _EXACT_INT


def _digest(data: bytes) -> tuple[int, int]:
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class TreeChannel:
    """Broadcasts trees within a group; one tree costs a header, its numbers at once and each bigger tensor.

    A tree is anything that pickles; tensors inside cross by themselves, without their graph, and plain ones arrive for
    subclasses. All ranks must use the channel in the same order.

    Args:
        group: process group; its ranks must all construct the channel.
        device: where tensors cross, and arrive unless they come from CPU.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._known: OrderedDict[tuple[int, int], _Skeleton] = OrderedDict()

    def broadcast(self, tree: Any, source: int) -> Any:
        """Gives the tree of one rank to all.

        Args:
            tree: what to give; ignored on the other ranks.
            source: rank in the group that gives.

        Returns:
            The tree itself on the source; elsewhere its tensors are on the channel's device, or on CPU as before.

        Raises:
            RemoteError: the source could not pickle its tree.
            AbsentValueError: the tree holds a value that lives on another stage (on the source).
            TypeError: the tree holds something that does not pickle (on the source).
        """
        if dist.get_world_size(self._group) == 1:
            return tree
        if dist.get_rank(self._group) == source:
            self._give(tree, source)
            return tree
        return self._take(source)

    def _give(self, tree: Any, source: int) -> None:
        stream = io.BytesIO()
        extractor = _Extractor(stream)
        try:
            extractor.dump(tree)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            self._send(torch.tensor([0, 0, _FAILED, len(text)], device=self._device), source)
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device), source)
            if isinstance(error, (pickle.PicklingError, AttributeError)):
                raise TypeError(f"A result of the step cannot be given to the other ranks: {error}") from error
            raise
        content = extractor.content
        shapes = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in content.tensors)
        skeleton = _Skeleton(stream.getvalue(), len(content.numbers), shapes)
        data = pickle.dumps((skeleton.pickled, skeleton.numbers, skeleton.tensors))
        digest = _digest(data)
        known = digest in self._known
        self._send(torch.tensor([*digest, 0 if known else len(data), 0], device=self._device), source)
        if not known:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device), source)
        self._remember(digest, skeleton)
        if content.numbers:
            self._send(self._pack(content), source)
        for tensor in content.tensors:
            if tensor.numel():
                self._send(_as_bytes(tensor.to(self._device)), source)

    def _pack(self, content: _Content) -> Tensor:
        numbers = torch.tensor(content.numbers, dtype=torch.float64).to(self._device)
        if content.scalars:
            places = torch.tensor(list(content.scalars), device=self._device)
            # one kernel instead of a wait for each value
            numbers[places] = torch.stack([value.to(self._device, torch.float64) for value in content.scalars.values()])
        return numbers

    def _take(self, source: int) -> Any:
        header = self._send(torch.empty(4, dtype=torch.int64, device=self._device), source).tolist()
        digest, length = (header[0], header[1]), header[2]
        if length == _FAILED:
            raise RemoteError(f"rank {_global_rank(self._group, source)}: {self._bytes(header[3], source).decode()}")
        if length:
            skeleton = _Skeleton(*pickle.loads(self._bytes(length, source)))
        else:
            skeleton = self._known[digest]
        self._remember(digest, skeleton)
        numbers = None
        if skeleton.numbers:
            numbers = self._send(torch.empty(skeleton.numbers, dtype=torch.float64, device=self._device), source)
        tensors = []
        for dtype, shape in skeleton.tensors:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            if tensor.numel():
                self._send(_as_bytes(tensor), source)
            tensors.append(tensor)
        return _Inserter(skeleton.pickled, numbers, iter(tensors)).load()

    def _remember(self, digest: tuple[int, int], skeleton: _Skeleton) -> None:
        """Keeps a skeleton; every rank of the group keeps and forgets the same ones, as all see the same traffic."""
        self._known.pop(digest, None)
        if len(skeleton.pickled) <= _KNOWN_BYTES:
            self._known[digest] = skeleton
            if len(self._known) > _KNOWN_SKELETONS:
                self._known.popitem(last=False)

    def _bytes(self, length: int, source: int) -> bytes:
        buffer = torch.empty(length, dtype=torch.uint8, device=self._device)
        return self._send(buffer, source).cpu().numpy().tobytes()

    def _send(self, tensor: Tensor, source: int) -> Tensor:
        dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor


def _global_rank(group: ProcessGroup | None, rank: int) -> int:
    return dist.get_global_rank(group, rank) if group is not None else rank


# ------------------------------------------------------------------------------------------------ agreement


def agree(error: BaseException | None, group: ProcessGroup | None, device: torch.device) -> None:
    """Ends a phase together: if any rank failed in it, every rank raises.

    Args:
        error: what went wrong here, or None.
        group: ranks that end the phase, None for all; all of them must call.
        device: where the messages cross.

    Raises:
        BaseException: ``error``, on the ranks that have one.
        RemoteError: names the first rank that failed, on the others.
    """
    text = f"{type(error).__name__}: {error}".encode() if error is not None else b""
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    if error is not None:
        lengths[dist.get_rank(group)] = len(text)
    dist.all_reduce(lengths, group=group)
    failed = [rank for rank, length in enumerate(lengths.tolist()) if length]
    if not failed:
        return
    first = failed[0]
    message = torch.zeros(int(lengths[first]), dtype=torch.uint8, device=device)
    if dist.get_rank(group) == first:
        message.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(message, group=group, group_src=first)
    if error is not None:
        raise error
    others = f" (and {len(failed) - 1} more of {len(lengths)} ranks failed)" if len(failed) > 1 else ""
    said = message.cpu().numpy().tobytes().decode(errors="replace")
    raise RemoteError(f"rank {_global_rank(group, first)}: {said}{others}")


def all_or_none(run: Callable[[], _T], group: ProcessGroup | None, device: torch.device) -> _T:
    """Runs something that ranks do together; if it fails on any of them, every rank raises, as by :func:`agree`."""
    result, error = cast(_T, None), None
    try:
        result = run()
    except Exception as caught:  # noqa: BLE001 - told to all ranks
        error = caught
    agree(error, group, device)
    return result


# ------------------------------------------------------------------------------------------------ batches


def batch_checksum(batch: Any) -> int:
    """A number that differs for batches that differ in a value, an order, a shape, a type or a key.

    Looks at tensors, numpy arrays, texts and numbers in any nesting of mappings, sequences and dataclasses; of other
    objects only the type counts.

    Returns:
        A whole number of 63 bits, the same on CPU and GPU.
    """
    digest = hashlib.blake2b(digest_size=8)
    _digest_into(batch, digest.update)
    return int.from_bytes(digest.digest(), "little") >> 1


def _digest_into(tree: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(tree, Tensor):
        values = tree.detach().to_dense() if tree.layout != torch.strided else tree.detach()
        update(f"{tuple(tree.shape)}{tree.dtype}{_mix(values)}".encode())
    elif hasattr(tree, "__array__") and hasattr(tree, "tobytes"):
        update(f"{tree.shape}{tree.dtype}".encode())
        update(repr(tree.tolist()).encode() if tree.dtype.hasobject else tree.tobytes())
    elif (found := children_of(tree)) is not None:
        children = found[0]
        keys = [repr(key) for key in tree.keys()] if isinstance(tree, Mapping) else []
        update(f"({type(tree).__qualname__}{len(children)}{keys}".encode())
        for child in children:
            _digest_into(child, update)
    elif tree is None or isinstance(tree, (str, bytes, int, float, complex)):
        update(f"{type(tree).__qualname__}{tree!r},".encode())
    else:
        update(type(tree).__qualname__.encode())


def _mix(tensor: Tensor) -> int:
    """Sum over 8-byte words, each stirred, then weighted by its place; whole numbers wrap around alike everywhere."""
    data = _as_bytes(tensor)
    if not data.numel():
        return 0
    words = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    words = (words ^ (words >> 31)) * -7046029254386353131
    return int(((torch.arange(len(words), device=words.device) * 2 + 1) * words).sum())


def check_same_batch(batch: Any, group: ProcessGroup | None, device: torch.device) -> None:
    """Makes sure that the ranks of a group, one pipeline, were fed the same batch. All of them must call.

    Raises:
        UnequalBatchError: they were not; on every rank.
    """
    own = torch.tensor([batch_checksum(batch)], device=device)
    gathered = own.new_empty(dist.get_world_size(group))
    dist.all_gather_single(gathered, own, group=group)
    sums = gathered.tolist()
    if len(set(sums)) == 1:
        return
    same: dict[int, list[int]] = {}
    for rank, checksum in enumerate(sums):
        same.setdefault(checksum, []).append(_global_rank(group, rank))
    parts = "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in same.values())
    raise UnequalBatchError(
        f"The ranks of one pipeline were fed {len(same)} different batches (equal within: {parts}). They work on one "
        "batch and must load the same data in the same order. Ways out: shuffle with a DistributedSampler made with "
        "`**self.trainer.strategy.distributed_sampler_kwargs` (Lightning adds one to an ordinary DataLoader); call "
        "`seed_everything` before data are split or shuffled; let an IterableDataset take its shard by "
        "`self.trainer.strategy.data_parallel_rank`, not by the global rank."
    )
