"""Mean losses with ignored targets, right under micro-batches and data ranks.

A mean over the valid targets of a batch is not the mean of the means of its parts. The targets follow from the batch
alone, so a run of the step with every unit absent reaches the loss with real targets and counts them before the
schedule starts. Where the parts differ, the loss is evaluated as a sum over this part divided by the valid targets of
the whole batch: right for every step whose loss is an affine function of it, whatever its coefficients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_SIGNATURES = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


@dataclass(frozen=True)
class LossCall:
    """A mean loss that skips targets.

    Attributes:
        ignore_index: value of the skipped targets.
        batch_leaf: number of the batch's leaf that the targets are a view of; None if they are computed.
        weighted: targets count by the weight of their class.
        inside: it is called within a unit, where its targets cannot be seen beforehand.
        reads: unit outputs that its logits derive from.
    """

    ignore_index: int
    batch_leaf: int | None
    weighted: bool
    inside: bool
    reads: frozenset[Any] = frozenset()


class _Intercept(TorchFunctionMode):
    def __init__(self, handle: Callable[[Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (signature := _SIGNATURES.get(func)) is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            if given["reduction"] == "mean" and given["reduce"] is None and given["size_average"] is None:
                return self._handle(func, given)
        return func(*args, **kwargs)


@contextmanager
def watch_losses(found: list[LossCall], batch_storages: dict[int, int], tracker: Any) -> Iterator[None]:
    """Notes the mean losses that a traced step calls."""

    def note(func: Any, given: dict[str, Any]) -> Any:
        if not given["target"].dtype.is_floating_point:
            leaf = batch_storages.get(given["target"].untyped_storage()._cdata)
            reads = frozenset(key for key in tracker.of(given["input"]) if isinstance(key, tuple))
            found.append(LossCall(given["ignore_index"], leaf, given["weight"] is not None, tracker.inside, reads))
        return func(**given)

    with _Intercept(note):
        yield


@contextmanager
def counted_losses(counts: list[Tensor]) -> Iterator[None]:
    """Appends, for each mean loss called, the number (or class weight) of its valid targets as a float64 scalar."""

    def count(func: Any, given: dict[str, Any]) -> Any:
        if not given["target"].dtype.is_floating_point:
            counts.append(_valid(given))
        return func(**given)

    with _Intercept(count):
        yield


@contextmanager
def whole_batch_losses(factors: Sequence[float]) -> Iterator[None]:
    """Evaluates the n-th mean loss as its sum times ``factors[n]``."""
    remaining = iter(factors)

    def scale(func: Any, given: dict[str, Any]) -> Any:
        if given["target"].dtype.is_floating_point:
            return func(**given)
        return func(**{**given, "reduction": "sum"}) * next(remaining)

    with _Intercept(scale):
        yield


def _valid(given: dict[str, Any]) -> Tensor:
    target, weight = given["target"], given["weight"]
    if isinstance(target, FakeTensor):
        return torch.tensor(float("nan"), dtype=torch.float64)
    valid = target != given["ignore_index"]
    if weight is None:
        return valid.sum().double()
    return weight.detach()[target[valid]].sum().double()
