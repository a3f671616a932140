"""Bytes that autograd keeps between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.parallel.step.saved import watching_saved


@dataclass
class SavedBytes:
    """What was saved, each memory once.

    Attributes:
        total: bytes of all distinct storages saved so far.
        by_dtype: the same by dtype of what was saved.
    """

    total: int = 0
    by_dtype: dict[torch.dtype, int] = field(default_factory=dict)


@contextmanager
def saved_bytes(ignored: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    """Counts the bytes of tensors saved for backward inside; works on fake tensors too.

    What is saved inside stays alive until the context ends, so that memory that is used again is not counted as one.

    Args:
        ignored: tensors whose memory does not count: parameters, buffers and inputs.
    """
    result = SavedBytes()
    known = {tensor.untyped_storage()._cdata for tensor in ignored}
    kept: list[Any] = []

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            kept.append(storage)
            result.total += storage.nbytes()
            result.by_dtype[tensor.dtype] = result.by_dtype.get(tensor.dtype, 0) + storage.nbytes()

    with watching_saved(note):
        yield result
