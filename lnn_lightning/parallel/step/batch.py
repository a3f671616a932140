"""Micro-batches: where the batch dimension is and how a batch is cut along it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.tree import children_of, tree_leaves, tree_map, tree_tensors


def batch_size_of(batch: Any) -> int | None:
    """Number of samples, or None where no batch dimension can be found.

    In a batch made of equally long lists of scalars, or of tensors of different shapes, it is their length.
    Otherwise it is the most common of the first dimensions of tensors and the lengths of lists of other things
    (strings, one dict a sample).
    """
    columns = _columns(batch)
    sizes = list(_sizes(batch))
    if any(map(_are_scalars, columns)) or (len(set(sizes)) > 1 and any(map(_differ, columns))):
        return len(columns[0])
    if any(size != 1 for size in sizes):
        sizes = [size for size in sizes if size != 1]  # those are there to be broadcast
    if len(set(sizes)) > 1 and columns:
        return len(columns[0])
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def _columns(batch: Any) -> list[Any]:
    """The entries of a batch, if they are equally long lists or tuples."""
    entries = children_of(batch)
    columns = entries[0] if entries is not None else []
    if not columns or not all(type(column) in (list, tuple) for column in columns):
        return []
    return list(columns) if len({len(column) for column in columns}) == 1 else []


def _are_scalars(entries: Any) -> bool:
    return len(entries) > 0 and all(isinstance(entry, Tensor) and entry.dim() == 0 for entry in entries)


def _differ(entries: Any) -> bool:
    """Whether a list holds tensors of different shapes."""
    return len({tuple(tensor.shape) for tensor in entries if isinstance(tensor, Tensor)}) > 1


def _sizes(tree: Any) -> Iterator[int]:
    if isinstance(tree, Tensor):
        if tree.dim() > 0:
            yield tree.shape[0]
        return
    if isinstance(tree, (list, tuple)) and _holds_samples(tree):
        yield len(tree)
        return
    found = children_of(tree)
    for child in found[0] if found is not None else ():
        yield from _sizes(child)


def _holds_samples(entries: Any) -> bool:
    """Whether a list has an entry a sample: none of them is a tensor or a list of them."""
    if hasattr(entries, "_fields") or not entries:
        return False
    return not any(isinstance(entry, (Tensor, list, tuple)) or entry is None for entry in entries)


def microbatch_count(batch_size: int, wanted: int) -> int:
    """Largest divisor of ``batch_size`` that is not above ``wanted``."""
    return next(count for count in range(min(wanted, batch_size), 0, -1) if batch_size % count == 0)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Cuts a batch into ``count`` micro-batches of equally many samples, in order.

    Tensors are cut along their first dimension (views, no copies), lists with one entry a sample by entries; tensors
    without or with a first dimension of one, and other values, are handed to every micro-batch.

    Raises:
        StepError: there is no batch dimension, or a tensor does not have it.
    """
    if count == 1:
        return [batch]
    size = batch_size_of(batch)
    if size is None:
        raise StepError(
            "The batch has no batch dimension (no tensor with at least one dimension), so it cannot be cut into "
            f"{count} micro-batches. Return tensors whose first dimension is the batch from the dataloader, or set "
            "`microbatches=1`."
        )
    if size % count:
        raise StepError(f"A batch of {size} samples cannot be cut into {count} equal micro-batches.")
    step = size // count
    return [cut_batch(batch, size, start, start + step) for start in range(0, size, step)]


def cut_batch(tree: Any, size: int, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a batch of ``size``."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0 or (tree.shape[0] == 1 and size > 1):
            return tree
        if tree.shape[0] != size:
            raise StepError(
                f"A tensor of the batch has shape {tuple(tree.shape)}, but the batch has {size} samples: it cannot be "
                "cut into micro-batches. Give it a first dimension of the batch's size, make it a buffer of the "
                "module if it is the same for all samples, or set `microbatches=1`."
            )
        return tree[start:stop]
    if isinstance(tree, (list, tuple)) and _is_one_entry_a_sample(tree, size):
        return type(tree)(tree[start:stop])
    found = children_of(tree)
    if found is None:
        return tree
    children, rebuild = found
    return rebuild([cut_batch(child, size, start, stop) for child in children])


def _is_one_entry_a_sample(entries: list[Any] | tuple[Any, ...], size: int) -> bool:
    if len(entries) != size or hasattr(entries, "_fields"):
        return False
    return _holds_samples(entries) or any(
        not tensors or any(tensor.dim() == 0 or tensor.shape[0] != size for tensor in tensors)
        for tensors in map(tree_tensors, entries)
    )


def signature_of(batch: Any) -> tuple[Any, ...]:
    """What decides the shapes inside a step: shapes, dtypes and devices of the tensors, kinds of the other values."""
    return tuple(_describe(leaf) for leaf in tree_leaves(batch))


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device)
    return leaf if leaf is None or isinstance(leaf, bool) else type(leaf)


def own_copy(batch: Any) -> Any:
    """The batch with its tensors copied, for a step that changes them in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
