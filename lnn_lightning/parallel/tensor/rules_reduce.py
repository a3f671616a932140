"""Rules for what works along some dimensions: reductions, softmaxes, normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, enter, reduce
from lnn_lightning.parallel.tensor.rules_math import Args, Kwargs, elementwise, functions, result_of, whole_operand
from lnn_lightning.parallel.tensor.sharded import (
    RULES,
    axis_of,
    given,
    is_sharded,
    like,
    operand,
    refused,
    rule,
    spec_of,
)

T = Tensor


def _dims(args: Args, kwargs: Kwargs, ndim: int, position: int = 1) -> list[int] | None:
    wanted = args[position] if len(args) > position else kwargs.get("dim")
    if wanted is None or wanted == ():
        return None
    return [dim % ndim for dim in ([wanted] if isinstance(wanted, int) else wanted)]


def _shrunk(spec: Spec, dims: Sequence[int], keepdim: bool) -> Spec:
    return spec if keepdim else spec.at(spec.dim - sum(dim < spec.dim for dim in dims))


@rule(*functions(["sum", "mean"]))
def _sum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0] if args else kwargs["input"]
    spec, axis = spec_of(value), axis_of(value)
    if spec.padded(axis.size):
        return refused(func, value)
    dims = _dims(args, kwargs, value.ndim)
    keepdim = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    if dims is not None and spec.dim not in dims:
        return like(func(*args, **kwargs), _shrunk(spec, dims, keepdim), value)
    result = reduce(func(*args, **kwargs), axis)
    return result / axis.size if func in (torch.mean, T.mean) else result


@rule(
    *functions(["var", "std", "amax", "amin", "prod", "logsumexp", "argmax", "argmin", "norm", "any", "all", "nansum"])
)
def reduced(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The same reduction of parts, over dimensions that are whole."""
    value = args[0]
    position = 2 if func in (torch.norm, T.norm) else 1
    dims = _dims(args, kwargs, value.ndim, position)
    if not dims or spec_of(value).dim in dims or any(isinstance(each, bool) for each in args):
        return refused(func, value)
    result = func(*args, **kwargs)
    return like(result, _shrunk(spec_of(value), dims, bool(kwargs.get("keepdim", False))), value)


@rule(*functions(["softmax", "log_softmax", "softmin", "cumsum", "cumprod", "normalize", "glu", "tril", "triu"]))
def along(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The same operation on parts, along dimensions that are whole."""
    value = args[0]
    if func.__name__.startswith("tri"):
        dims: list[int] | None = [value.ndim - 1, value.ndim - 2]
    else:
        default = {"dim": 1} if func is F.normalize else {"dim": -1} if func is F.glu else {}
        dims = _dims(args, {**default, **kwargs}, value.ndim, 2 if func is F.normalize else 1)
    if func is F.glu and dims == [spec_of(value).dim]:
        halves = RULES[torch.chunk](torch.chunk, (value, 2, dims[0]), {})
        if halves is NotImplemented:
            return NotImplemented
        return elementwise(torch.mul, (halves[0], elementwise(torch.sigmoid, (halves[1],), {})), {})
    if not dims or spec_of(value).dim in dims:
        return refused(func, value)
    return result_of(func(*args, **kwargs), spec_of(value), value)


@rule(*functions(["topk", "sort", "max", "min", "var_mean", "std_mean", "median"]))
def _pairs(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if any(isinstance(each, bool) for each in args[1:3]) and "mean" in func.__name__:
        return refused(func, value)  # older forms, with `unbiased` in other places
    if "other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor)):
        return elementwise(func, args, kwargs)
    if func in (torch.topk, T.topk, torch.sort, T.sort):
        at = 2 if func in (torch.topk, T.topk) else 1
        dims = _dims(args, {"dim": -1, **kwargs}, value.ndim, at)
        keepdim = True
    else:
        dims = _dims(args, kwargs, value.ndim)
        keepdim = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    if not dims or spec_of(value).dim in dims:
        return refused(func, value)
    spec = _shrunk(spec_of(value), dims, keepdim)
    result = func(*args, **kwargs)
    parts = [like(each, spec, value) for each in result]
    return type(result)(parts) if type(result) is not tuple else tuple(parts)


# ------------------------------------------------------------------ normalisation


@rule(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def _layer_norm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    names: tuple[str, ...] = ("input", "normalized_shape", "weight", "bias", "eps")
    if func in (F.rms_norm, torch.rms_norm):
        names = ("input", "normalized_shape", "weight", "eps")
    call = {key: value for key, value in given(names, args, kwargs).items() if key in names}
    value = call["input"]
    if not is_sharded(value) or is_sharded(call.get("weight")):
        return NotImplemented
    spec, axis = spec_of(value), axis_of(value)
    shape = call["normalized_shape"]
    first = value.ndim - (1 if isinstance(shape, int) else len(shape))
    function, eps = (F.layer_norm, 1e-5) if "bias" in names else (F.rms_norm, None)
    call.setdefault("eps", eps)
    if spec.dim < first:
        for name in ("weight", "bias"):
            if call.get(name) is not None:
                call[name] = whole_operand(call[name], axis)
        return like(function(**call), spec, value)
    if first != value.ndim - 1 or spec.padded(axis.size):
        return refused(func, value)
    return _norm_of_features(value, spec, axis, call, centred="bias" in names)


def _norm_of_features(value: Tensor, spec: Spec, axis: TensorAxis, call: Kwargs, centred: bool) -> Tensor:
    """Layer norm (or RMS norm) over features that are divided: their sums are added up over the ranks."""
    eps = call.get("eps")
    dtype = torch.promote_types(value.dtype, torch.float32)
    eps = torch.finfo(value.dtype).eps if eps is None else eps
    result = value.to(dtype)
    total = spec.total

    def mean(part: Tensor) -> Tensor:
        added = reduce(part.sum(-1, keepdim=True), axis) / total
        return enter(added, axis)

    if centred:
        result = result - mean(result)
    result = result * torch.rsqrt(mean(result.square()) + eps)
    for name, combine in (("weight", torch.mul), ("bias", torch.add)):
        if call.get(name) is not None:
            made = operand(call[name], -1, spec, axis)
            assert made is not None
            result = combine(result, made)
    return like(result.to(value.dtype), spec, value)
