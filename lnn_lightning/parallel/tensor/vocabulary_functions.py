"""The parts of `vocabulary`: which columns are here, and the autograd functions over them.

All compute in fp32 at least, on the real columns only; padding is put on again at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp


@dataclass(frozen=True)
class VocabularyPart:
    """The columns of the vocabulary that are here.

    Attributes:
        start: the first of them.
        size: how many there are, padding included; the same on every rank.
        total: the size of the real vocabulary.
        group: the ranks that hold the vocabulary together.
    """

    start: int
    size: int
    total: int
    group: ProcessGroup

    @property
    def real(self) -> int:
        """How many columns here are no padding."""
        return max(0, min(self.total - self.start, self.size))


def vocabulary_part(total: int, group: ProcessGroup) -> VocabularyPart:
    """This rank's part of a vocabulary, of the same width on every rank: `ceil(total / ranks)`."""
    size = -(-total // group.size())
    return VocabularyPart(group.rank() * size, size, total, group)


class _SumOverRanks(torch.autograd.Function):
    """A sum over the ranks; each rank's gradient is the whole sum's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup) -> Tensor:
        total = value.contiguous().clone()
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _CrossEntropy(torch.autograd.Function):
    """The loss of each target; zero where it is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ignored: Tensor,
        part: VocabularyPart,
        dim: int,
        weight: Tensor | None,
        smoothing: float,
    ) -> Tensor:
        shifted, _ = _shifted(logits, part, dim)
        index, here = local_index(target, part)
        here = here & ~ignored
        sums = [column_of(shifted, index, here, dim)]
        local_weight = None if weight is None else _along(weight[part.start : part.start + part.real], shifted, dim)
        if smoothing:
            sums.append((shifted if local_weight is None else shifted * local_weight).sum(dim))
        exp = shifted.exp_()
        sums.append(exp.sum(dim))
        reduced = torch.stack(sums)
        all_reduce(reduced, part.group)
        log_sum = reduced[-1].log()
        share = torch.full_like(log_sum, 1.0 - smoothing)
        if weight is not None:
            share = share * weight_of(weight, target, ignored)
        losses = share * (log_sum - reduced[0])
        smooth_share = smoothing / part.total
        of_exp = share
        if smoothing:
            all_weights = part.total if weight is None else weight.sum()
            losses = losses + smooth_share * (all_weights * log_sum - reduced[1])
            of_exp = share + smooth_share * all_weights
        # torch keeps as little in bf16; its range is enough for numbers below one, fp16's is not
        kept = exp.to(torch.bfloat16) if logits.dtype == torch.bfloat16 else exp
        ctx.save_for_backward(kept, of_exp / reduced[-1], share, index, here, ignored, local_weight)
        ctx.part, ctx.dim, ctx.smooth_share, ctx.dtype = part, dim, smooth_share, logits.dtype
        return losses.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exp, of_exp, share, index, here, ignored, weight = ctx.saved_tensors
        dim = ctx.dim
        given = grads[0].masked_fill(ignored, 0.0)
        grad = exp * (given * of_exp).unsqueeze(dim)
        if ctx.part.real:
            grad.scatter_add_(dim, index.unsqueeze(dim), -(given * share).masked_fill(~here, 0.0).unsqueeze(dim))
        if ctx.smooth_share:
            smooth = (ctx.smooth_share * given).unsqueeze(dim)
            grad -= smooth if weight is None else smooth * weight
        return _padded(grad.to(ctx.dtype), ctx.part, dim, 0.0), None, None, None, None, None, None


class _LogSoftmax(torch.autograd.Function):
    """Cut as the logits are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: VocabularyPart, dim: int) -> Tensor:
        shifted, _ = _shifted(logits, part, dim)
        total = _summed(shifted.exp().sum(dim, keepdim=True), part)
        result = (shifted - total.log()).to(logits.dtype)
        ctx.save_for_backward(result)
        ctx.part, ctx.dim = part, dim
        return _padded(result, part, dim, -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        given = wide(grads[0].narrow(ctx.dim, 0, ctx.part.real))
        total = _summed(given.sum(ctx.dim, keepdim=True), ctx.part)
        grad = (given - wide(result).exp() * total).to(result.dtype)
        return _padded(grad, ctx.part, ctx.dim, 0.0), None, None


class _Softmax(torch.autograd.Function):
    """Cut as the logits are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: VocabularyPart, dim: int) -> Tensor:
        shifted, _ = _shifted(logits, part, dim)
        exp = shifted.exp_()
        result = (exp / _summed(exp.sum(dim, keepdim=True), part)).to(logits.dtype)
        ctx.save_for_backward(result)
        ctx.part, ctx.dim = part, dim
        return _padded(result, part, dim, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        given = wide(grads[0].narrow(ctx.dim, 0, ctx.part.real))
        total = _summed((given * result).sum(ctx.dim, keepdim=True), ctx.part)
        return _padded(((given - total) * result).to(result.dtype), ctx.part, ctx.dim, 0.0), None, None


class _LogSumExp(torch.autograd.Function):
    """Whole on every rank; the class dimension has size one."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: VocabularyPart, dim: int) -> Tensor:
        shifted, highest = _shifted(logits, part, dim, finite=True)
        exp = shifted.exp_()
        total = _summed(exp.sum(dim, keepdim=True), part)
        ctx.save_for_backward(exp, total)
        ctx.part, ctx.dim, ctx.dtype = part, dim, logits.dtype
        return (total.log() + highest).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        exp, total = ctx.saved_tensors
        return _padded((exp * (grads[0] / total)).to(ctx.dtype), ctx.part, ctx.dim, 0.0), None, None


sum_over_ranks = _SumOverRanks.apply
cross_entropies = _CrossEntropy.apply
sharded_log_softmax = _LogSoftmax.apply
sharded_softmax = _Softmax.apply
whole_logsumexp = _LogSumExp.apply


def all_reduce(value: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
    """In place. Fake tensors (values absent on this pipeline stage) have shapes only: nothing is sent for them."""
    if not isinstance(value, FakeTensor):
        dist.all_reduce(value, op, group)


def wide(value: Tensor) -> Tensor:
    """In fp32 at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def local_index(target: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Where the targets are in this part (zero for those elsewhere), and which are here."""
    index = target - part.start
    here = (index >= 0) & (index < part.real)
    return index.masked_fill(~here, 0), here


def column_of(values: Tensor, index: Tensor, here: Tensor, dim: int) -> Tensor:
    """The value of each position's own class, zero where that is not here. `values` has the real columns."""
    if values.size(dim) == 0:
        return values.sum(dim)
    return values.gather(dim, index.unsqueeze(dim)).squeeze(dim).masked_fill(~here, 0.0)


def weight_of(weight: Tensor, target: Tensor, ignored: Tensor) -> Tensor:
    """The weight of each target's class, zero for ignored ones."""
    return weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0.0)


def _shifted(logits: Tensor, part: VocabularyPart, dim: int, finite: bool = False) -> tuple[Tensor, Tensor]:
    """A new tensor: the real logits less the highest over all ranks; and the highest."""
    here = wide(logits.narrow(dim, 0, part.real))
    shape = [1 if d == dim else n for d, n in enumerate(logits.shape)]
    highest = here.amax(dim, keepdim=True) if part.real else here.new_full(shape, -torch.inf)
    highest = highest.contiguous()
    all_reduce(highest, part.group, ReduceOp.MAX)
    if finite:
        highest = highest.masked_fill(highest.isinf(), 0.0)
    return here - highest, highest


def _summed(value: Tensor, part: VocabularyPart) -> Tensor:
    value = value.contiguous()
    all_reduce(value, part.group)
    return value


def _along(weight: Tensor, like: Tensor, dim: int) -> Tensor:
    return weight.view([-1 if d == dim else 1 for d in range(like.dim())])


def _padded(values: Tensor, part: VocabularyPart, dim: int, fill: float) -> Tensor:
    if part.real == part.size:
        return values
    shape = [part.size if d == dim else n for d, n in enumerate(values.shape)]
    padded = values.new_full(shape, fill)
    padded.narrow(dim, 0, part.real).copy_(values)
    return padded
