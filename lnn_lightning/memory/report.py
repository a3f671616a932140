"""Bytes that autograd keeps, by what they are kept as."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class BytesOf:
    """Bytes of one encoding.

    Attributes:
        tensors: how many memories were encoded.
        before: bytes that autograd would have kept.
        after: bytes that are kept.
    """

    tensors: int = 0
    before: int = 0
    after: int = 0


@dataclass
class Report:
    """Bytes that were kept, by encoding; each memory once."""

    by_encoding: dict[str, BytesOf] = field(default_factory=dict)
    _seen: dict[tuple[int, int], StorageWeakRef] = field(default_factory=dict, repr=False)

    def add(self, name: str, tensor: Tensor, after: int, before: int | None = None) -> None:
        """Counts the memory of a tensor, or of a part of it.

        Args:
            name: the encoding.
            tensor: a tensor in that memory.
            after: bytes that are kept.
            before: bytes of the part; None: the whole memory.
        """
        storage = tensor.untyped_storage()
        entry = self.by_encoding.setdefault(name, BytesOf())
        entry.after += after
        key = storage._cdata, tensor._version
        if before is None and key not in self._seen:
            self._seen[key] = StorageWeakRef(storage)
            before = storage.nbytes()
        if before is not None:
            entry.tensors, entry.before = entry.tensors + 1, entry.before + before

    @property
    def total(self) -> BytesOf:
        """All encodings together."""
        entries = self.by_encoding.values()
        return BytesOf(*(sum(getattr(each, name) for each in entries) for name in ("tensors", "before", "after")))

    def table(self) -> str:
        """The report for people, the largest first."""
        rows = sorted(self.by_encoding.items(), key=lambda item: -item[1].before)
        width = max(len(name) for name in ("encoding", *self.by_encoding))
        lines = [f"{'encoding':<{width}}  tensors  MB before   MB after   ratio"]
        for name, entry in [*rows, ("all", self.total)]:
            ratio = f"{entry.before / entry.after:7.2f}" if entry.after and entry.before else "      -"
            lines.append(
                f"{name:<{width}}  {entry.tensors:7d} {entry.before / 1e6:10.2f} {entry.after / 1e6:10.2f} {ratio}"
            )
        return "\n".join(lines)
