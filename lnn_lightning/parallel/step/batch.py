"""Micro-batches: where the batch dimension is and how a batch is cut along it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.tree import children_of, tree_leaves, tree_map, tree_tensors


def batch_size_of(batch: Any) -> int | None:
    """Number of samples, or None where no batch dimension can be found.

    It is the first dimension that all tensors share; else, in a batch made of equally long lists of samples, their
    length; else the most common first dimension.
    """
    sizes = [tensor.shape[0] for tensor in tree_tensors(batch) if tensor.dim() > 0]
    entries = children_of(batch)
    lists = entries[0] if entries and entries[0] and all(isinstance(entry, list) for entry in entries[0]) else []
    if len({len(entry) for entry in lists}) == 1 and any(map(_differ, lists)):
        return len(lists[0])
    if sizes and len(set(sizes)) == 1:
        return sizes[0]
    if len({len(entry) for entry in lists}) == 1:
        return len(lists[0])
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def _differ(entries: list[Any]) -> bool:
    """Whether a list holds samples: tensors of different shapes, or scalars."""
    shapes = [tuple(tensor.shape) for tensor in entries if isinstance(tensor, Tensor)]
    return len(set(shapes)) > 1 or () in shapes


def microbatch_count(batch_size: int, wanted: int) -> int:
    """Largest divisor of ``batch_size`` that is not above ``wanted``."""
    return next(count for count in range(min(wanted, batch_size), 0, -1) if batch_size % count == 0)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Cuts a batch into ``count`` micro-batches of equally many samples, in order.

    Tensors are cut along their first dimension (views, no copies), lists with one entry a sample by entries; 0-d
    tensors and other values are handed to every micro-batch.

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
        if tree.dim() == 0:
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
    return any(
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
