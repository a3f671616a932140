"""The tensor axis as layers see it, and what crosses it: Megatron's conjugate pairs as autograd functions.

A value is *whole* (equal on all tensor ranks, with equal gradients), *sharded* (each rank has its part of one
dimension) or *partial* (the ranks' values must be added up). Each function says what it makes of what (Shoeybi et al.
2019, section 3; Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ledger(Protocol):
    """Told what a planned run does."""

    def sent(self, what: str, forward: int, backward: int) -> None:
        """Bytes that each rank sends in a collective."""

    def partial(self, parameter: Tensor) -> None:
        """A whole parameter is used on a rank's part alone: its gradients must be added up."""

    def used_on_whole(self, parameter: Tensor) -> None:
        """A whole parameter is used on wholes: each rank has its whole gradient."""

    def mark(self) -> Any:
        """A place in the books."""

    def take_back(self, mark: Any) -> None:
        """Forgets what was sent, and which parameters are partial, since a mark."""

    def gathered(self, operation: str, origins: frozenset[str], sections: tuple[int, ...] | None) -> None:
        """An operation has no rule for values that these layers sharded; sections under which it would."""


@dataclass(frozen=True, eq=False)
class TensorAxis:
    """Tensor ranks of one group. A planned run has no group, only a ledger.

    Attributes:
        size: number of tensor ranks.
        rank: this rank's place.
        group: the ranks; None while planning.
        inside: values are inside of a unit, where the gradients of whole parameters that are used on a rank's part
            may stay partial: they are added up once a step. Elsewhere each use adds them up.
        ledger: told of everything while planning.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None
    inside: bool = False
    ledger: Ledger | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        return self

    def all_reduce(self, value: Tensor, own: bool = False) -> Tensor:
        """The sum over the ranks, as a new tensor, or in place of one that nobody else reads (``own``)."""
        result = value.contiguous() if own else value.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            dist.all_reduce(result, group=self.group)
        return result

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """The values of all ranks."""
        if self.group is None:
            return [value] * self.size
        value = value.resolve_conj().resolve_neg()
        parts = value.new_empty((self.size, *value.shape))
        dist.all_gather_single(parts.view(-1), value.contiguous().view(-1), group=self.group)
        return list(parts.unbind(0))

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        """The sum over the ranks of their part for this one."""
        result = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        if self.group is not None:
            dist.reduce_scatter_single(result.view(-1), torch.stack(parts).view(-1), group=self.group)
        return result

    def note(self, what: str, value: Tensor, forward: float, backward: float) -> None:
        """Books bytes: factors of the size of ``value``, as a ring sends them."""
        if self.ledger is not None:
            size = value.numel() * value.element_size()
            back = int(size * backward) if value.requires_grad and torch.is_grad_enabled() else 0
            self.ledger.sent(what, int(size * forward), back)

    @property
    def ring(self) -> float:
        """Share of a whole tensor that each rank sends in an all-gather or reduce-scatter."""
        return (self.size - 1) / self.size


@dataclass(frozen=True)
class Spec:
    """Which part of a whole tensor a rank has: of one dimension, an equal part of each section.

    Attributes:
        dim: the sharded dimension, counted from the front.
        sections: sizes of the sections the whole dimension consists of; their sum is its size. A rank's part is its
            share of the first, of the second, ... One section alone may be no multiple of the ranks: the last parts
            are padded.
        sequence: it is the token dimension between blocks (sequence parallelism), not features or heads.
    """

    dim: int
    sections: tuple[int, ...]
    sequence: bool = False

    @property
    def total(self) -> int:
        """Size of the whole dimension."""
        return sum(self.sections)

    def local(self, size: int) -> int:
        """Size of a rank's part, padding included."""
        return sum(-(-section // size) for section in self.sections)

    def part_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Shape of a rank's part of a whole of ``shape``."""
        return (*shape[: self.dim], self.local(size), *shape[self.dim + 1 :])

    def padded(self, size: int) -> bool:
        """Whether the parts hold more than the whole."""
        return self.local(size) * size != self.total

    def at(self, dim: int) -> Spec:
        """The same for a tensor with the dimension in another place."""
        return Spec(dim, self.sections, self.sequence)

    def fits(self, size: int) -> bool:
        """Whether every section can be divided; padding is for one section alone."""
        return len(self.sections) == 1 or all(section % size == 0 for section in self.sections)


def reduced_shape(shape: Sequence[int], reduced: Sequence[int]) -> tuple[int, ...]:
    """The shape of statistics of a tensor, which have one element along the reduced dimensions."""
    return tuple(1 if dim in reduced else size for dim, size in enumerate(shape))


def spans_of_part(spec: Spec, size: int, rank: int) -> list[tuple[int, int, int]]:
    """Where a rank's part lies in the whole: runs of (first index in the part, first in the whole, length).

    Padding is in no run.
    """
    spans, part_start, whole_start = [], 0, 0
    for section in spec.sections:
        width = -(-section // size)
        first = min(rank * width, section)
        if (length := min(width, section - first)) > 0:
            spans.append((part_start, whole_start + first, length))
        part_start, whole_start = part_start + width, whole_start + section
    return spans


def take_part(whole: Tensor, spec: Spec, size: int, rank: int) -> Tensor:
    """A rank's part of a whole tensor (a view where it can be one); padding is zero."""
    if len(spec.sections) == 1:
        width = spec.local(size)
        start = min(rank * width, spec.total)
        here = max(min(width, spec.total - start), 0)
        part = whole.narrow(spec.dim, start, here)
        if here == width:
            return part
        shape = list(whole.shape)
        shape[spec.dim] = width - here
        return torch.cat([part, part.new_zeros(shape)], spec.dim)
    pieces = [
        section.narrow(spec.dim, rank * (section.shape[spec.dim] // size), section.shape[spec.dim] // size)
        for section in whole.split(list(spec.sections), spec.dim)
    ]
    return torch.cat(pieces, spec.dim)


def join_parts(parts: list[Tensor], spec: Spec) -> Tensor:
    """The whole tensor from the parts of all ranks."""
    size = len(parts)
    if len(spec.sections) == 1:
        whole = torch.cat(parts, spec.dim)
        return whole.narrow(spec.dim, 0, spec.total).clone() if spec.padded(size) else whole
    widths = [section // size for section in spec.sections]
    split = [part.split(widths, spec.dim) for part in parts]
    return torch.cat([pieces[index] for index in range(len(widths)) for pieces in split], spec.dim)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis) -> Tensor:
        if not value.is_contiguous():
            return axis.all_reduce(value)
        ctx.mark_dirty(value)
        return axis.all_reduce(value, own=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis, spec: Spec) -> Tensor:
        ctx.axis, ctx.spec = axis, spec
        return take_part(value, spec, axis.size, axis.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return join_parts(ctx.axis.all_gather(gradient), ctx.spec), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis, spec: Spec, partial: bool) -> Tensor:
        ctx.axis, ctx.spec, ctx.partial = axis, spec, partial
        return join_parts(axis.all_gather(value), spec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        axis, spec = ctx.axis, ctx.spec
        if not ctx.partial:
            return take_part(gradient, spec, axis.size, axis.rank).contiguous(), None, None, None
        parts = [take_part(gradient, spec, axis.size, rank) for rank in range(axis.size)]
        return axis.reduce_scatter(parts), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis, spec: Spec) -> Tensor:
        ctx.axis, ctx.spec = axis, spec
        return axis.reduce_scatter([take_part(value, spec, axis.size, rank) for rank in range(axis.size)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return join_parts(ctx.axis.all_gather(gradient), ctx.spec), None, None


def enter(value: Tensor, axis: TensorAxis) -> Tensor:
    """Whole -> whole, for a use that gives partial gradients (Megatron's f)."""
    if not value.requires_grad:
        return value
    axis.note("all-reduce", value, 0, 2 * axis.ring)
    entered = value.view_as(value)  # torch's own view: the value may be changed in place later
    if entered.requires_grad:
        entered.register_hook(axis.all_reduce)
    return entered


def reduce(value: Tensor, axis: TensorAxis) -> Tensor:
    """Partial -> whole (Megatron's g). The value must be a fresh one: it is added up in place."""
    axis.note("all-reduce", value, 2 * axis.ring, 0)
    return _Reduce.apply(value, axis)


def scatter(value: Tensor, axis: TensorAxis, spec: Spec) -> Tensor:
    """Whole -> sharded."""
    axis.note("all-gather", value, 0, axis.ring)
    return _Scatter.apply(value, axis, spec)


def gather(value: Tensor, axis: TensorAxis, spec: Spec) -> Tensor:
    """Sharded -> whole, used alike on all ranks."""
    axis.note("all-gather", value, axis.ring * axis.size, 0)
    return _Gather.apply(value, axis, spec, False)


def gather_for_partial(value: Tensor, axis: TensorAxis, spec: Spec) -> Tensor:
    """Sharded -> whole, for a use that gives partial gradients (the f of sequence parallelism)."""
    axis.note("all-gather", value, axis.ring * axis.size, axis.ring * axis.size)
    return _Gather.apply(value, axis, spec, True)


def reduce_scatter(value: Tensor, axis: TensorAxis, spec: Spec) -> Tensor:
    """Partial -> sharded (the g of sequence parallelism)."""
    axis.note("reduce-scatter", value, axis.ring, axis.ring)
    return _ReduceScatter.apply(value, axis, spec)
