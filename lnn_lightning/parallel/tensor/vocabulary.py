"""Losses, softmaxes and embeddings whose vocabulary (class dimension) is cut over the ranks of a process group.

Each rank holds `size` consecutive columns of the logits (rows of the embedding); the last columns may be padding, which
never counts and gets gradients of zero. No logits are gathered: only values of one class's worth travel, in at most two
all-reduces (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3, for the cross entropy and the embedding).

Values that are whole on every rank (losses, targets, embedded tokens) have the same, full gradient on every rank; so
nothing is divided by the number of ranks. All functions that communicate do so in forward, the softmaxes in backward
too: every rank of the group must call them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ReduceOp

from lnn_lightning.parallel.tensor.vocabulary_functions import (
    VocabularyPart,
    all_reduce,
    column_of,
    cross_entropies,
    local_index,
    sharded_log_softmax,
    sharded_softmax,
    sum_over_ranks,
    vocabulary_part,
    weight_of,
    whole_logsumexp,
    wide,
)

__all__ = [
    "VocabularyPart",
    "argmax",
    "cross_entropy",
    "embedding",
    "embedding_partial",
    "log_softmax",
    "logsumexp",
    "nll_loss",
    "softmax",
    "vocabulary_part",
]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    part: VocabularyPart,
    dim: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` for targets that are class numbers. Two all-reduces, both in forward.

    Args:
        logits: of shape `(C,)`, `(N, C)` or `(N, C, d1, ...)`, where `C` is the part's size.
        target: class numbers of the whole vocabulary; the shape of the logits without the class dimension.
        part: which columns of the logits are here.
        dim: the class dimension, if another than `cross_entropy`'s.
        weight: of the whole vocabulary, shape `(total,)`; the same on every rank.
        ignore_index: value of the targets that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: between 0 and 1.

    Returns:
        The loss in the dtype `cross_entropy` would give it in, whole on every rank.

    Raises:
        ValueError: an option or a shape that `cross_entropy` or the part does not allow.
        TypeError: the targets are no class numbers.
        IndexError: a target outside of the vocabulary (on CUDA: a device assertion).
    """
    dim = _class_dimension(logits, part, dim)
    weight = _checked_loss_arguments(logits, target, part, dim, weight, reduction)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    logits = _under_autocast(logits, _cross_entropy_of_one)
    target, ignored = target.long(), target == ignore_index
    _check_range(target, ignored, part, "Target")
    losses = cross_entropies(logits, target, ignored, part, dim, weight, label_smoothing)
    return _reduced_loss(losses, target, ignored, weight, reduction).to(logits.dtype)


def nll_loss(
    log_probabilities: Tensor,
    target: Tensor,
    part: VocabularyPart,
    dim: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.nll_loss` of what :func:`log_softmax` returns. One all-reduce, in forward.

    Takes, returns and raises what :func:`cross_entropy` does.
    """
    dim = _class_dimension(log_probabilities, part, dim)
    weight = _checked_loss_arguments(log_probabilities, target, part, dim, weight, reduction)
    log_probabilities = _under_autocast(log_probabilities, _nll_loss_of_one)
    target, ignored = target.long(), target == ignore_index
    _check_range(target, ignored, part, "Target")
    index, here = local_index(target, part)
    picked = column_of(log_probabilities.narrow(dim, 0, part.real), index, here & ~ignored, dim)
    losses = -sum_over_ranks(wide(picked), part.group)
    if weight is not None:
        losses = losses * weight_of(weight, target, ignored)
    return _reduced_loss(losses, target, ignored, weight, reduction).to(log_probabilities.dtype)


def log_softmax(logits: Tensor, part: VocabularyPart, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.nn.functional.log_softmax`, cut as the logits are; padding is minus infinity.

    Two all-reduces in forward, one in backward.

    Raises:
        ValueError: the class dimension has not the part's size.
    """
    dim = _class_dimension(logits, part, dim)
    logits = _under_autocast(logits, torch.log_softmax) if dtype is None else logits.to(dtype)
    return sharded_log_softmax(logits, part, dim)


def softmax(logits: Tensor, part: VocabularyPart, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.nn.functional.softmax`, cut as the logits are; padding is zero.

    Two all-reduces in forward, one in backward.

    Raises:
        ValueError: the class dimension has not the part's size.
    """
    dim = _class_dimension(logits, part, dim)
    logits = _under_autocast(logits, torch.softmax) if dtype is None else logits.to(dtype)
    return sharded_softmax(logits, part, dim)


def logsumexp(logits: Tensor, part: VocabularyPart, dim: int = -1, keepdim: bool = False) -> Tensor:
    """`torch.logsumexp` over the whole vocabulary, whole on every rank. Two all-reduces, both in forward.

    Raises:
        ValueError: the class dimension has not the part's size.
    """
    dim = _class_dimension(logits, part, dim)
    logits = _under_autocast(logits, torch.logsumexp)
    result = whole_logsumexp(logits, part, dim)
    return result if keepdim else result.squeeze(dim)


@torch.no_grad()
def argmax(logits: Tensor, part: VocabularyPart, dim: int = -1, keepdim: bool = False) -> Tensor:
    """`torch.argmax` over the whole vocabulary: the first of equal ones, NaN before all. Two all-reduces.

    Raises:
        ValueError: the class dimension has not the part's size.
    """
    dim = _class_dimension(logits, part, dim)
    shape = [1 if d == dim else n for d, n in enumerate(logits.shape)]
    value, index = logits.new_full(shape, -torch.inf), logits.new_full(shape, part.total, dtype=torch.int64)
    if part.real:
        here = logits.narrow(dim, 0, part.real)
        index = here.argmax(dim, keepdim=True)
        value = here.gather(dim, index)
        index = index + part.start
    # a maximum over ranks may lose a NaN, so it travels beside
    mine = torch.stack([wide(value).nan_to_num(torch.inf, torch.inf, -torch.inf), wide(value.isnan())])
    best = mine.clone()
    all_reduce(best, part.group, ReduceOp.MAX)
    index = torch.where((mine == best).all(0), index, part.total)
    all_reduce(index, part.group, ReduceOp.MIN)
    return index if keepdim else index.squeeze(dim)


def embedding(
    ids: Tensor,
    weight: Tensor,
    part: VocabularyPart,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding` with the rows of the table cut over the ranks. One all-reduce, in forward.

    Args:
        ids: numbers of rows of the whole table; any shape, the same on every rank.
        weight: this rank's rows, shape `(part.size, features)`.
        part: which rows are here.
        padding_idx: row of the whole table that gets no gradient.
        max_norm: see `torch.nn.functional.embedding`; so for the others.
        norm_type: order of the norm for `max_norm`.
        scale_grad_by_freq: divide the gradient of a row by its number of occurrences.
        sparse: make a sparse gradient.

    Returns:
        The rows, shape `(*ids.shape, features)`, whole on every rank.

    Raises:
        ValueError: the part has not that many rows, or there is no such `padding_idx`.
        IndexError: an id outside of the table (on CUDA: a device assertion).
    """
    rows = embedding_partial(ids, weight, part, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return sum_over_ranks(rows, part.group)


def embedding_partial(
    ids: Tensor,
    weight: Tensor,
    part: VocabularyPart,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """What :func:`embedding` sums over the ranks: the rows that are here, zeros for others. No communication."""
    if weight.size(0) != part.size:
        raise ValueError(f"The embedding has {weight.size(0)} rows on this rank, {part.size} were expected.")
    if padding_idx is not None and not -part.total <= padding_idx < part.total:
        raise ValueError(f"padding_idx must be within the {part.total} rows of the embedding, got {padding_idx}.")
    _check_range(ids, None, part, "Index")
    index, here = local_index(ids, part)
    padding = None if padding_idx is None else padding_idx % part.total - part.start
    local_padding = padding if padding is not None and 0 <= padding < part.size else None
    options = (local_padding, max_norm, norm_type, scale_grad_by_freq, sparse)
    if max_norm is None and not scale_grad_by_freq and not sparse:
        return F.embedding(index, weight, *options).masked_fill(~here.unsqueeze(-1), 0.0)
    # these look at which rows are used, so that no other row may stand for the ones that are elsewhere
    rows = F.embedding(index[here], weight, *options)
    return rows.new_zeros(*ids.shape, weight.size(1)).masked_scatter(here.unsqueeze(-1), rows)


def _class_dimension(logits: Tensor, part: VocabularyPart, dim: int | None) -> int:
    if dim is None:
        dim = 0 if logits.dim() == 1 else 1
    if logits.size(dim) != part.size:
        raise ValueError(f"Dimension {dim} of {tuple(logits.shape)} has not the {part.size} columns of this rank.")
    return dim % logits.dim()


def _checked_loss_arguments(
    logits: Tensor, target: Tensor, part: VocabularyPart, dim: int, weight: Tensor | None, reduction: str
) -> Tensor | None:
    """Refuses what torch refuses; the weight in the dtype of the computation."""
    if target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"Targets must be class numbers (int64 or uint8), got {target.dtype}.")
    expected = logits.shape[:dim] + logits.shape[dim + 1 :]
    if target.shape != expected:
        raise ValueError(f"Targets must have the shape {tuple(expected)}, got {tuple(target.shape)}.")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if weight is None:
        return None
    if weight.shape != (part.total,):
        raise ValueError(f"Class weights must have the shape ({part.total},), got {tuple(weight.shape)}.")
    if weight.requires_grad:
        raise ValueError("The loss is not differentiable with respect to the class weights: detach them.")
    return weight.to(torch.promote_types(logits.dtype, torch.float32))


def _check_range(index: Tensor, ignored: Tensor | None, part: VocabularyPart, what: str) -> None:
    """A number that no rank holds would silently be taken for zero."""
    wrong = (index < 0) | (index >= part.total)
    if ignored is not None:
        wrong = wrong & ~ignored
    if isinstance(wrong, FakeTensor):
        return
    if index.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"{what} out of bounds")  # without waiting for the device
    elif wrong.any():
        raise IndexError(f"{what} {int(index[wrong][0])} is out of bounds: there are {part.total}.")


def _reduced_loss(losses: Tensor, target: Tensor, ignored: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
    """Losses of zero for ignored targets, reduced as torch does: a mean by the weights of the others."""
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / ((~ignored).sum() if weight is None else weight_of(weight, target, ignored).sum())


def _cross_entropy_of_one(logits: Tensor, dim: int) -> Tensor:
    return F.cross_entropy(logits, logits.new_zeros((), dtype=torch.int64))


def _nll_loss_of_one(log_probabilities: Tensor, dim: int) -> Tensor:
    return F.nll_loss(log_probabilities, log_probabilities.new_zeros((), dtype=torch.int64))


def _under_autocast(logits: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The logits in the dtype in which torch's function works under the autocast that is on."""
    device = logits.device.type
    if not torch.is_autocast_enabled(device):
        return logits
    return logits.to(_dtype_under_autocast(function, device, torch.get_autocast_dtype(device), logits.dtype))


@cache
def _dtype_under_autocast(
    function: Callable[[Tensor, int], Tensor], device: str, autocast: torch.dtype, dtype: torch.dtype
) -> torch.dtype:
    return function(torch.zeros(1, dtype=dtype, device=device), 0).dtype
