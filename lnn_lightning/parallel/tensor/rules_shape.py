"""Rules for operations that only look at, or move, the dimensions of a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.parallel.tensor.axis import Spec, take_part
from lnn_lightning.parallel.tensor.sharded import (
    axis_of,
    is_sharded,
    like,
    plain,
    refused,
    rule,
    spec_of,
    whole,
    whole_shape,
)

T = Tensor
Args = Sequence[Any]
Kwargs = dict[str, Any]


def moved_spec(spec: Spec, shape: Sequence[int], new: Sequence[int], size: int) -> Spec | None:
    """Where the shard is once a whole of ``shape`` is viewed as ``new``; None if parts cannot be viewed so.

    The whole's elements, in order, are ``outer`` groups of ``size`` equal runs, one for each rank; a view keeps that
    if it has a dimension in which these groups begin.
    """
    before = math.prod(shape[: spec.dim])
    position = 1
    for dim, length in enumerate(new):
        if position == before and length == spec.total:
            return spec.at(dim)
        position *= length
    if len(set(spec.sections)) > 1 or spec.padded(size):
        return None
    outer, position = before * len(spec.sections), 1
    for dim, length in enumerate(new):
        if position <= outer < position * length and outer % position == 0:
            groups = outer // position
            if length % groups == 0 and (length // groups) % size == 0:
                return Spec(dim, (length // groups,) * groups, spec.sequence)
        position *= length
    return None


def _viewed(func: Any, value: Tensor, sizes: Sequence[int]) -> Any:
    spec, axis, shape = spec_of(value), axis_of(value), whole_shape(value)
    new = list(sizes)
    if -1 in new:
        new[new.index(-1)] = math.prod(shape) // max(-math.prod(new), 1)
    moved = moved_spec(spec, shape, new, axis.size)
    if moved is None:
        before, position, sections = math.prod(shape[: spec.dim]), 1, None
        for length in new:
            if position == before and length > 1 and spec.total % length == 0:
                sections = (spec.total // length,) * length
                break
            position *= length
        return refused(func, value, sections)
    local = list(new)
    local[moved.dim] = moved.local(axis.size)
    part = T.reshape(value, local) if func is not T.view else T.view(value, local)
    return like(part, moved, value)


def sizes_of(given: Args) -> list[int]:
    """Sizes given one by one or as one sequence."""
    return list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else list(given)


@rule(T.shape.__get__)  # type: ignore[attr-defined]
def _shape(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return torch.Size(whole_shape(args[0]))


@rule(T.size)
def _size(func: Any, args: Args, kwargs: Kwargs) -> Any:
    shape = torch.Size(whole_shape(args[0]))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


@rule(T.__len__)
def _len(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return whole_shape(args[0])[0]


@rule(T.numel, T.nelement, torch.numel)
def _numel(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return math.prod(whole_shape(args[0]))


@rule(
    T.dim,
    T.ndimension,
    T.is_floating_point,
    torch.is_floating_point,
    T.is_complex,
    torch.is_complex,
    T.element_size,
    T.is_contiguous,
    T.get_device,
    T.requires_grad_,
    T.retain_grad,
    T.is_inference,
    T.type,
    T.is_signed,
    T.__hash__,
    T.untyped_storage,
    T.data_ptr,
    T.storage_offset,
    T._is_view,
    T.is_pinned,
    torch.is_tensor,
    T.is_shared,
    torch.is_grad_enabled,
    torch.result_type,
    torch.is_autocast_enabled,
    T.new_zeros,
    T.new_ones,
    T.new_full,
    T.new_empty,
    T.new_tensor,
    T.register_post_accumulate_grad_hook,
)
def _as_it_is(func: Any, args: Args, kwargs: Kwargs) -> Any:
    result = func(*args, **kwargs)
    if func is T.type and isinstance(result, Tensor):
        return like(result, spec_of(args[0]), args[0])
    return result


@rule(T.register_hook)
def _register_hook(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The hook gets the gradient as a part, which knows what it is a part of."""
    value, hook = args
    spec, axis = spec_of(value), axis_of(value)

    def with_part(gradient: Tensor) -> Any:
        found = hook(like(gradient.view(gradient.shape), spec, value))
        if not isinstance(found, Tensor):
            return found
        if is_sharded(found) and spec_of(found) == spec:
            return plain(found)
        return take_part(whole(found), spec, axis.size, axis.rank)

    return func(value, with_part)


@rule(T.stride)
def _stride(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Those of the whole as gathering makes it: contiguous."""
    shape = whole_shape(args[0])
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return strides if dim is None else strides[dim]


@rule(T.nbytes.__get__)  # type: ignore[attr-defined]
def _nbytes(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return math.prod(whole_shape(args[0])) * args[0].element_size()


@rule(T.__repr__, T.__format__)
def _repr(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return f"Sharded({spec_of(args[0])}, {T.__repr__(args[0])})"


@rule(T.__deepcopy__)
def _deepcopy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return like(args[0].detach().clone(), spec_of(args[0]), args[0])


@rule(T.view, T.reshape, torch.reshape)
def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value: Any = args[0]
    wanted = [*args[1:], *(kwargs[name] for name in ("shape", "size") if name in kwargs)]
    if not is_sharded(value) or not wanted or isinstance(wanted[0], torch.dtype):
        return NotImplemented
    return _viewed(func, value, sizes_of(wanted))


@rule(T.view_as, T.reshape_as)
def _view_as(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if not is_sharded(args[0]):
        return NotImplemented
    return _viewed(T.reshape, args[0], whole_shape(args[1]) if is_sharded(args[1]) else list(args[1].shape))


@rule(T.flatten, torch.flatten)
def _flatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    start = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    end = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
    shape = whole_shape(value)
    start, end = start % len(shape), end % len(shape)
    return _viewed(T.reshape, value, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule(T.unflatten, torch.unflatten)
def _unflatten(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
    shape = whole_shape(value)
    dim %= len(shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // max(-math.prod(sizes), 1)
    return _viewed(T.reshape, value, [*shape[:dim], *sizes, *shape[dim + 1 :]])


@rule(torch.view_as_complex, torch.view_as_real)
def _complex(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if func is torch.view_as_complex and spec_of(value).dim == value.ndim - 1:
        return NotImplemented
    return like(func(value), spec_of(value), value)


def _permuted(func: Any, args: Args, kwargs: Kwargs, order: list[int]) -> Any:
    spec = spec_of(args[0])
    return like(func(*args, **kwargs), spec.at(order.index(spec.dim)), args[0])


@rule(T.transpose, torch.transpose, T.swapaxes, torch.swapaxes, T.swapdims, torch.swapdims)
def _transpose(func: Any, args: Args, kwargs: Kwargs) -> Any:
    first, second = [*args[1:], *kwargs.values()]
    order = list(range(args[0].ndim))
    order[first], order[second] = order[second], order[first]
    return _permuted(func, args, kwargs, order)


@rule(T.permute, torch.permute)
def _permute(func: Any, args: Args, kwargs: Kwargs) -> Any:
    order = sizes_of([*args[1:], *kwargs.values()])
    return _permuted(func, args, kwargs, [dim % args[0].ndim for dim in order])


@rule(T.movedim, torch.movedim, T.moveaxis, torch.moveaxis)
def _movedim(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    marks = func(torch.empty([*range(2, value.ndim + 2)], device="meta"), *args[1:], **kwargs)
    return _permuted(func, args, kwargs, [size - 2 for size in marks.shape])


@rule(T.t, torch.t, T.T.__get__, T.mT.__get__, T.H.__get__, T.mH.__get__, T.adjoint)  # type: ignore[attr-defined]
def _turned(func: Any, args: Args, kwargs: Kwargs) -> Any:
    order = list(range(args[0].ndim))
    if func in (T.T.__get__, T.H.__get__):  # type: ignore[attr-defined]
        order.reverse()
    elif len(order) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    return _permuted(func, args, kwargs, order)


@rule(T.unsqueeze, torch.unsqueeze)
def _unsqueeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    spec, dim = spec_of(value), args[1] if len(args) > 1 else kwargs["dim"]
    dim = dim if dim >= 0 else dim + value.ndim + 1
    return like(func(*args, **kwargs), spec.at(spec.dim + (dim <= spec.dim)), value)


@rule(T.squeeze, torch.squeeze)
def _squeeze(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    spec, shape = spec_of(value), whole_shape(value)
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = range(len(shape)) if given is None else [given] if isinstance(given, int) else list(given)
    gone = [dim % len(shape) for dim in dims if shape[dim] == 1]
    part = T.squeeze(value, tuple(gone)) if gone else T.view(value, value.shape)
    return like(part, spec.at(spec.dim - sum(dim < spec.dim for dim in gone)), value)


@rule(T.expand, T.expand_as, torch.broadcast_to, T.broadcast_to)
def _expand(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if not is_sharded(value):
        return NotImplemented
    if func is T.expand_as:
        sizes = whole_shape(args[1]) if is_sharded(args[1]) else list(args[1].shape)
    else:
        sizes = sizes_of([*args[1:], *kwargs.values()])
    spec = spec_of(value)
    dim = len(sizes) - (value.ndim - spec.dim)
    if sizes[dim] not in (-1, spec.total):
        return NotImplemented
    sizes[dim] = -1
    return like(T.expand(value, sizes), spec.at(dim), value)


@rule(T.repeat, T.tile, torch.tile)
def _repeat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, counts = args[0], sizes_of([*args[1:], *kwargs.values()])
    spec = spec_of(value)
    counts = [1] * (value.ndim - len(counts)) + counts
    dim = spec.dim + len(counts) - value.ndim
    if counts[dim] != 1:
        return NotImplemented
    return like(T.repeat(value, counts), spec.at(dim), value)


@rule(T.repeat_interleave, torch.repeat_interleave)
def _repeat_interleave(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(repeats, int) or dim is None:
        return NotImplemented
    spec = spec_of(value)
    if dim % value.ndim == spec.dim:
        if spec.padded(axis_of(value).size):
            return NotImplemented
        spec = Spec(spec.dim, tuple(section * repeats for section in spec.sections), spec.sequence)
    return like(T.repeat_interleave(value, repeats, dim), spec, value)
