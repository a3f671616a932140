"""Rules for operations that cut parts, and join them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.tensor.axis import Spec
from lnn_lightning.parallel.tensor.rules_shape import Args, Kwargs, sizes_of
from lnn_lightning.parallel.tensor.sharded import (
    axis_of,
    given,
    is_sharded,
    like,
    operand,
    refused,
    rule,
    spec_of,
    whole_shape,
)

T = Tensor


def cut_at(spec: Spec, bounds: Sequence[int]) -> tuple[int, ...]:
    """Sections that also begin at the given places."""
    edges = sorted({0, spec.total, *bounds, *accumulate(spec.sections)})
    return tuple(b - a for a, b in zip(edges, edges[1:], strict=False))


def _range_of(value: Tensor, start: int, stop: int) -> tuple[slice, Spec] | None:
    """The local range, and what it is, of a range of the whole sharded dimension made of whole sections."""
    spec, size = spec_of(value), axis_of(value).size
    edges = [0, *accumulate(spec.sections)]
    if start >= stop or start not in edges or stop not in edges or spec.padded(size):
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
    call = given(("input", "sizes", "dim"), args, kwargs, dim=0)
    value = call["tensor"] if "tensor" in call else call["input"]
    names = ("sizes", "split_size_or_sections", "split_size", "split_sizes", "chunks")
    wanted = next(call[name] for name in names if name in call)
    dim = call["dim"] % value.ndim
    total = whole_shape(value)[dim]
    if func in (torch.chunk, T.chunk):
        wanted = -(-total // wanted)
    sizes = list(wanted) if not isinstance(wanted, int) else [min(wanted, total - at) for at in range(0, total, wanted)]
    edges = [0, *accumulate(sizes)]
    return _cut(func, value, dim, list(zip(edges, edges[1:], strict=False)))


@rule(T.unbind, torch.unbind, T.__iter__)
def _unbind(func: Any, args: Args, kwargs: Kwargs) -> Any:
    call = given(("input", "dim"), args, kwargs, dim=0)
    value = call["input"]
    spec, dim = spec_of(value), call["dim"] % value.ndim
    if dim == spec.dim:
        return refused(func, value)
    parts = tuple(like(each, spec.at(spec.dim - (dim < spec.dim)), value) for each in T.unbind(value, dim))
    return iter(parts) if func is T.__iter__ else parts


@rule(T.narrow, torch.narrow)
def _narrow(func: Any, args: Args, kwargs: Kwargs) -> Any:
    call = given(("input", "dim", "start", "length"), args, kwargs)
    value, dim, start, length = (call[name] for name in ("input", "dim", "start", "length"))
    if not isinstance(start, int):
        return NotImplemented
    found = _cut(func, value, dim % value.ndim, [(start, start + length)])
    return found if found is NotImplemented else found[0]


@rule(T.select, torch.select)
def _select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    call = given(("input", "dim", "index"), args, kwargs)
    value = call["input"]
    spec, dim = spec_of(value), call["dim"] % value.ndim
    if dim == spec.dim:
        return refused(func, value)
    return like(func(*args, **kwargs), spec.at(spec.dim - (dim < spec.dim)), value)


@rule(T.__getitem__)
def _getitem(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value, index = args
    if not is_sharded(value):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    count = sum(each is not None and each is not Ellipsis for each in index)
    if any(isinstance(each, bool) or not isinstance(each, (int, slice, type(None), type(Ellipsis))) for each in index):
        return refused(func, value)
    full: list[Any] = []
    for each in index:
        full += [slice(None)] * (value.ndim - count) if each is Ellipsis else [each]
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
    call = given(("tensors", "dim"), args, kwargs, dim=0)
    tensors = call["tensors"]
    if "out" in call:
        return NotImplemented
    lead = next(each for each in tensors if is_sharded(each))
    tensors = [each for each in tensors if not (each.ndim == 1 and each.shape[0] == 0)]
    dim = call["dim"] % lead.ndim
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
    call = given(("tensors", "dim"), args, kwargs, dim=0)
    tensors = call["tensors"]
    if "out" in call:
        return NotImplemented
    lead = next(each for each in tensors if is_sharded(each))
    dim = call["dim"] % (lead.ndim + 1)
    spec = spec_of(lead)
    fitted = _fitted(tensors, lead, spec.dim - lead.ndim)
    if fitted is None:
        return refused(func, lead)
    return like(torch.stack(fitted, dim), spec.at(spec.dim + (dim <= spec.dim)), lead)


@rule(torch.roll, T.roll, torch.flip, T.flip)
def _roll(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if func in (torch.roll, T.roll):
        call = given(("input", "shifts", "dims"), args, kwargs, dims=None)
        value, dims = call["input"], call["dims"]
    else:
        call = given(("input",), args[:1], kwargs)
        value, dims = call["input"], call["dims"] if "dims" in call else sizes_of(args[1:])
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or any(dim % value.ndim == spec_of(value).dim for dim in dims):
        return refused(func, value)
    return like(func(*args, **kwargs), spec_of(value), value)


@rule(F.pad)
def _pad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    call = given(("input", "pad", "mode", "value"), args, kwargs, mode="constant")
    value, pads = call["input"], call["pad"]
    from_end = value.ndim - 1 - spec_of(value).dim
    if any(pads[2 * from_end : 2 * from_end + 2]) or call["mode"] != "constant":
        return refused(func, value)
    return like(func(*args, **kwargs), spec_of(value), value)


@rule(torch.index_select, T.index_select)
def _index_select(func: Any, args: Args, kwargs: Kwargs) -> Any:
    call = given(("input", "dim", "index"), args, kwargs)
    value, dim = call["input"], call["dim"]
    if not is_sharded(value) or dim % value.ndim == spec_of(value).dim:
        return NotImplemented
    return like(func(*args, **kwargs), spec_of(value), value)
