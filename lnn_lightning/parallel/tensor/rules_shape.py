"""Rules for operations that only look at, or move, the dimensions of a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.tensor.axis import Spec
from lnn_lightning.parallel.tensor.sharded import (
    axis_of,
    is_sharded,
    like,
    operand,
    refused,
    rule,
    spec_of,
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


def cut_at(spec: Spec, bounds: Sequence[int]) -> tuple[int, ...]:
    """Sections that also begin at the given places."""
    edges = sorted({0, spec.total, *bounds, *accumulate(spec.sections)})
    return tuple(b - a for a, b in zip(edges, edges[1:], strict=False))


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


def _sizes(given: Args) -> list[int]:
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
    *(
        T.dim,
        T.ndimension,
        T.is_floating_point,
        torch.is_floating_point,
        T.is_complex,
        torch.is_complex,
        T.element_size,
    ),
    *(
        T.is_contiguous,
        T.get_device,
        T.requires_grad_,
        T.register_hook,
        T.retain_grad,
        T.is_inference,
        T.type,
        T.is_signed,
    ),
    *(
        T.__hash__,
        T.untyped_storage,
        T.data_ptr,
        T.storage_offset,
        T._is_view,
        T.is_pinned,
        torch.is_tensor,
        T.is_shared,
    ),
    *(
        torch.is_grad_enabled,
        torch.result_type,
        torch.is_autocast_enabled,
        T.stride,
        T.new_zeros,
        T.new_ones,
        T.new_full,
    ),
    *(T.new_empty, T.new_tensor, T.register_post_accumulate_grad_hook),
)
def _as_it_is(func: Any, args: Args, kwargs: Kwargs) -> Any:
    result = func(*args, **kwargs)
    if func is T.type and isinstance(result, Tensor):
        return like(result, spec_of(args[0]), args[0])
    return result


@rule(T.__repr__, T.__format__)
def _repr(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return f"Sharded({spec_of(args[0])}, {T.__repr__(args[0])})"


@rule(T.__deepcopy__)
def _deepcopy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return like(args[0].detach().clone(), spec_of(args[0]), args[0])


@rule(T.view, T.reshape, torch.reshape)
def _view(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, given = args[0], [*args[1:], *kwargs.values()]
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        return NotImplemented
    return _viewed(func, value, _sizes(given))


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
    order = _sizes([*args[1:], *kwargs.values()])
    return _permuted(func, args, kwargs, [dim % args[0].ndim for dim in order])


@rule(T.movedim, torch.movedim, T.moveaxis, torch.moveaxis)
def _movedim(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    marks = func(
        torch.arange(value.ndim).view([1] * value.ndim).new_empty([*range(2, value.ndim + 2)]), *args[1:], **kwargs
    )
    return _permuted(func, args, kwargs, [size - 2 for size in marks.shape])


@rule(T.t, torch.t, T.T.__get__, T.mT.__get__, T.adjoint)  # type: ignore[attr-defined]
def _turned(func: Any, args: Args, kwargs: Kwargs) -> Any:
    order = list(range(args[0].ndim))
    if func is T.T.__get__:  # type: ignore[attr-defined]
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
        sizes = _sizes([*args[1:], *kwargs.values()])
    spec = spec_of(value)
    dim = len(sizes) - (value.ndim - spec.dim)
    if sizes[dim] not in (-1, spec.total):
        return NotImplemented
    sizes[dim] = -1
    return like(T.expand(value, sizes), spec.at(dim), value)


@rule(T.repeat, T.tile, torch.tile)
def _repeat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, counts = args[0], _sizes([*args[1:], *kwargs.values()])
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


# ------------------------------------------------------------------ cutting and joining


def _range_of(value: Tensor, start: int, stop: int) -> tuple[slice, Spec] | None:
    """The local range, and what it is, of a range of the whole sharded dimension made of whole sections."""
    spec, size = spec_of(value), axis_of(value).size
    edges = [0, *accumulate(spec.sections)]
    if start not in edges or stop not in edges or spec.padded(size):
        return None
    first, last = edges.index(start), edges.index(stop)
    return slice(start // size, stop // size), Spec(spec.dim, spec.sections[first:last], spec.sequence)


def _cut(func: Any, value: Tensor, dim: int, bounds: list[tuple[int, int]]) -> Any:
    """Ranges of a dimension, as a tuple."""
    spec = spec_of(value)
    if dim != spec.dim:
        return tuple(like(value.narrow(dim, start, stop - start), spec, value) for start, stop in bounds)
    found = [_range_of(value, start, stop) for start, stop in bounds]
    if any(each is None for each in found):
        return refused(func, value, cut_at(spec, [edge for pair in bounds for edge in pair]))
    return tuple(
        like(value.narrow(dim, each[0].start, each[0].stop - each[0].start), each[1], value) for each in found if each
    )


@rule(torch.split, T.split, torch.functional.split, T.split_with_sizes, torch.split_with_sizes, torch.chunk, T.chunk)
def _split(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    names = ("split_size_or_sections", "split_size", "split_sizes", "chunks")
    given = args[1] if len(args) > 1 else next(kwargs[name] for name in names if name in kwargs)
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % value.ndim
    total = whole_shape(value)[dim]
    if func in (torch.chunk, T.chunk):
        given = -(-total // given)
    sizes = list(given) if not isinstance(given, int) else [min(given, total - at) for at in range(0, total, given)]
    edges = [0, *accumulate(sizes)]
    return _cut(func, value, dim, list(zip(edges, edges[1:], strict=False)))


@rule(T.unbind, torch.unbind, T.__iter__)
def _unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    spec, dim = spec_of(value), (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % value.ndim
    if dim == spec.dim:
        return refused(func, value)
    parts = tuple(like(each, spec.at(spec.dim - (dim < spec.dim)), value) for each in T.unbind(value, dim))
    return iter(parts) if func is T.__iter__ else parts


@rule(T.narrow, torch.narrow)
def _narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, dim, start, length = [*args, *kwargs.values()]
    if not isinstance(start, int):
        return NotImplemented
    found = _cut(func, value, dim % value.ndim, [(start, start + length)])
    return found if found is NotImplemented else found[0]


@rule(T.select, torch.select)
def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, dim, _ = [*args, *kwargs.values()]
    spec, dim = spec_of(value), dim % value.ndim
    if dim == spec.dim:
        return refused(func, value)
    return like(func(*args, **kwargs), spec.at(spec.dim - (dim < spec.dim)), value)


@rule(T.__getitem__)
def _getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, index = args
    if not is_sharded(value):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    given = sum(each is not None and each is not Ellipsis for each in index)
    if any(isinstance(each, bool) or not isinstance(each, (int, slice, type(None), type(Ellipsis))) for each in index):
        return refused(func, value)
    full: list[Any] = []
    for each in index:
        full += [slice(None)] * (value.ndim - given) if each is Ellipsis else [each]
    full += [slice(None)] * (value.ndim - sum(each is not None for each in full))
    spec, source, target, place = spec_of(value), 0, 0, 0
    local: list[Any] = []
    for each in full:
        if each is not None and source == spec.dim:
            found = _index_sharded(func, value, each)
            if found is NotImplemented:
                return NotImplemented
            (each, spec), place = found, target
        source += each is not None
        target += not isinstance(each, int)
        local.append(each)
    return like(T.__getitem__(value, tuple(local)), spec.at(place), value)


def _index_sharded(func: Any, value: Tensor, index: Any) -> Any:
    spec, size = spec_of(value), axis_of(value).size
    if not isinstance(index, slice):
        return refused(func, value)
    start, stop, step = index.indices(spec.total)
    if (start, stop, step) == (0, spec.total, 1):
        return slice(None), spec
    if step > 1 and stop == spec.total and start < step and all(each % (size * step) == 0 for each in spec.sections):
        return slice(start, None, step), Spec(spec.dim, tuple(each // step for each in spec.sections), spec.sequence)
    if step != 1:
        return refused(func, value)
    found = _range_of(value, start, stop)
    return found if found is not None else refused(func, value, cut_at(spec, [start, stop]))


def _fitted(tensors: Sequence[Tensor], lead: Tensor, from_end: int) -> list[Tensor] | None:
    """All tensors as parts like ``lead``; None if one cannot be one."""
    spec, axis = spec_of(lead), axis_of(lead)
    fitted = []
    for each in tensors:
        if is_sharded(each):
            if each.ndim != lead.ndim or spec_of(each) != spec:
                return None
            fitted.append(each)
            continue
        dim = each.ndim + from_end
        if dim < 0 or each.shape[dim] != spec.total:
            return None
        made = operand(each, from_end, spec, axis)
        if made is None:
            return None
        fitted.append(made)
    return fitted


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = args[0] if args else kwargs["tensors"]
    lead = next(each for each in tensors if is_sharded(each))
    tensors = [each for each in tensors if not (each.ndim == 1 and each.shape[0] == 0)]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % lead.ndim
    spec, axis = spec_of(lead), axis_of(lead)
    if dim != spec.dim:
        fitted = _fitted(tensors, lead, spec.dim - lead.ndim)
        return refused(func, lead) if fitted is None else like(torch.cat(fitted, dim), spec, lead)
    same = all(
        is_sharded(each) and spec_of(each).dim == dim and not spec_of(each).padded(axis.size) for each in tensors
    )
    if not same:
        return refused(func, lead)
    sections = tuple(section for each in tensors for section in spec_of(each).sections)
    return like(torch.cat(list(tensors), dim), Spec(dim, sections, spec.sequence), lead)


@rule(torch.stack)
def _stack(func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = args[0] if args else kwargs["tensors"]
    lead = next(each for each in tensors if is_sharded(each))
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (lead.ndim + 1)
    spec = spec_of(lead)
    fitted = _fitted(tensors, lead, spec.dim - lead.ndim)
    if fitted is None:
        return refused(func, lead)
    return like(torch.stack(fitted, dim), spec.at(spec.dim + (dim <= spec.dim)), lead)


@rule(torch.roll, T.roll, torch.flip, T.flip)
def _roll(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    rolls = func in (torch.roll, T.roll)
    dims = (args[2] if len(args) > 2 else kwargs.get("dims")) if rolls else _sizes([*args[1:], *kwargs.values()])
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or any(dim % value.ndim == spec_of(value).dim for dim in dims):
        return refused(func, value)
    return like(func(*args, **kwargs), spec_of(value), value)


@rule(F.pad)
def _pad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, pads = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    from_end = value.ndim - 1 - spec_of(value).dim
    if (
        any(pads[2 * from_end : 2 * from_end + 2])
        or (args[2] if len(args) > 2 else kwargs.get("mode", "constant")) != "constant"
    ):
        return refused(func, value)
    return like(func(*args, **kwargs), spec_of(value), value)


@rule(torch.index_select, T.index_select)
def _index_select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, dim, _ = [*args, *kwargs.values()]
    if not is_sharded(value) or dim % value.ndim == spec_of(value).dim:
        return NotImplemented
    return like(func(*args, **kwargs), spec_of(value), value)
