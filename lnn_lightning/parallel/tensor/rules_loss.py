"""Rules for logits that are divided along the vocabulary: losses and softmaxes without gathering them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lnn_lightning.parallel.tensor import vocabulary
from lnn_lightning.parallel.tensor.rules_math import Args, Kwargs, functions
from lnn_lightning.parallel.tensor.rules_reduce import along, reduced
from lnn_lightning.parallel.tensor.sharded import axis_of, is_sharded, like, refused, rule, spec_of
from lnn_lightning.parallel.tensor.vocabulary import VocabularyPart, vocabulary_part

_CROSS_ENTROPY, _NLL = inspect.signature(F.cross_entropy), inspect.signature(F.nll_loss)


def _part(value: Tensor) -> VocabularyPart | None:
    spec, axis = spec_of(value), axis_of(value)
    return vocabulary_part(spec.total, axis.group) if axis.group is not None and len(spec.sections) == 1 else None


def _planned(func: Any, value: Tensor, args: Args, kwargs: Kwargs) -> Any:
    """On the meta device shapes matter only, and a few numbers a row are sent."""
    rows = value.select(spec_of(value).dim, 0)
    axis_of(value).note("all-reduce", rows, 3 * 2 * axis_of(value).ring, 0)
    return func(*args, **kwargs)


@rule(F.cross_entropy, F.nll_loss)
def _loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    bound = (_CROSS_ENTROPY if func is F.cross_entropy else _NLL).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    value, target = given.pop("input"), given.pop("target")
    legacy = given.pop("size_average"), given.pop("reduce")
    if not is_sharded(value):
        return NotImplemented
    spec, dim = spec_of(value), 0 if value.ndim == 1 else 1
    if (
        target.dtype.is_floating_point
        or is_sharded(target)
        or spec.dim != dim
        or len(spec.sections) > 1
        or legacy != (None, None)
    ):
        return refused(func, value)
    part = _part(value)
    if part is None:
        return _planned(func, value, args, kwargs)
    ours = vocabulary.cross_entropy if func is F.cross_entropy else vocabulary.nll_loss
    return ours(value, target, part, **given)


@rule(*functions(["softmax", "log_softmax"]))
def _softmax(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    dtype = kwargs.get("dtype", args[-1] if isinstance(args[-1], torch.dtype) else None)
    if given is None or given % value.ndim != spec_of(value).dim or len(spec_of(value).sections) > 1:
        return along(func, args, kwargs)
    part = _part(value)
    if part is None:
        return like(_planned(func, value, args, kwargs), spec_of(value), value)
    ours = vocabulary.log_softmax if "log" in func.__name__ else vocabulary.softmax
    return like(ours(value, part, given, dtype), spec_of(value), value)


@rule(torch.logsumexp, Tensor.logsumexp, torch.argmax, Tensor.argmax)
def _over_vocabulary(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    spec = spec_of(value)
    if not value.is_floating_point():
        return reduced(func, args, kwargs)
    if not isinstance(given, int) or given % value.ndim != spec.dim or len(spec.sections) > 1:
        return reduced(func, args, kwargs)
    part = _part(value)
    if part is None:
        return _planned(func, value, args, kwargs)
    ours = vocabulary.logsumexp if func in (torch.logsumexp, Tensor.logsumexp) else vocabulary.argmax
    return ours(value, part, given, keepdim)
