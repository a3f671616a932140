"""How a step's loss adds up over samples: as a mean, as a sum, or neither.

A step is run on two micro-batches and on both together, with made-up results in place of every unit, and the losses are
compared. Nothing of the model is computed, only the glue and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.step.batch import batch_size_of, cut_batch, own_copy
from lnn_lightning.parallel.step.losses import counted_losses, whole_batch_losses
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.randomness import preserved_generators, preserved_rng, reseed
from lnn_lightning.parallel.step.run import StepRunner
from lnn_lightning.parallel.step.trace import Key, TensorInfo, Trace

LossForm = Literal["mean", "sum", "other", "unknown"]
"""What the loss of a batch is of the losses of its equal parts; unknown where it could not be found out."""

_RANDOM_TOLERANCE, _NARROW_TOLERANCE, _TOLERANCE = 0.25, 2e-2, 1e-3


def find_loss_form(
    book: PlanBook, runner: StepRunner, observer: StepObserver, step: Callable[[Any], Any], batch: Any
) -> LossForm:
    """Form of the loss of ``step``. Leaves nothing behind.

    Args:
        book: traces the step.
        runner: answers for the units.
        observer: mutes the step.
        step: the user's step.
        batch: a batch; of an even number of samples, or nothing can be said.
    """
    size = batch_size_of(batch)
    if size is None or size < 2:
        return "unknown"
    half = size // 2
    try:
        parts = [
            cut_batch(batch, size, 0, half),
            cut_batch(batch, size, half, 2 * half),
            cut_batch(batch, size, 0, 2 * half),
        ]
        traces = [book.trace(step, part) for part in (parts[0], parts[2])]
        rng = preserved_rng(torch.device("cpu"))
        with torch.no_grad(), observer.muted(), rng, preserved_generators(book.root), runner.opened():
            return _compare(book, runner, step, parts, traces)
    except Exception:  # noqa: BLE001 - a step that cannot run on made-up values says nothing about its loss
        return "unknown"


def _compare(
    book: PlanBook, runner: StepRunner, step: Callable[[Any], Any], parts: Sequence[Any], traces: Sequence[Trace]
) -> LossForm:
    if traces[0].names != traces[1].names:
        return "unknown"
    values = _made_up_results(*traces)
    cut = tuple(0 for _ in traces[0].calls)
    plans = [Plan(trace, cut, (), book.fake_mode, torch.device("cpu")) for trace in (traces[0], traces[0], traces[1])]
    counts: list[list[Tensor]] = [[], [], []]

    def loss_of(index: int, losses: Any) -> float:
        with runner.all_absent(plans[index], index, values[index]), losses:
            result = step(own_copy(parts[index]))
        return float(result["loss"] if isinstance(result, dict) else result)

    found = [loss_of(index, counted_losses(counts[index])) for index in range(3)]
    if counts[0] and [float(c) for c in counts[0]] != [float(c) for c in counts[1]]:
        factors = [2.0 / float(first + second) for first, second in zip(counts[0], counts[1], strict=True)]
        found[:2] = [loss_of(index, whole_batch_losses(factors)) for index in range(2)]
    own = [1.0 / float(count) for count in counts[0]]
    if own and not _is_affine(lambda scale: loss_of(0, whole_batch_losses([scale * factor for factor in own]))):
        return "other"
    mean, whole = (found[0] + found[1]) / 2, found[2]
    tolerance = _RANDOM_TOLERANCE if traces[0].glue_random else _tolerance(traces[0])
    for form, expected in (("mean", mean), ("sum", 2 * mean)):
        if abs(whole - expected) <= tolerance * abs(expected):
            return form  # type: ignore[return-value]
    return "other" if whole == whole and mean == mean else "unknown"


def _is_affine(loss_of_scale: Callable[[float], float]) -> bool:
    """Whether a step's loss grows by equal steps with its mean losses (a focal loss, say, does not)."""
    low, middle, high = (loss_of_scale(scale) for scale in (0.5, 1.0, 1.5))
    return abs((high - middle) - (middle - low)) <= 1e-3 * max(abs(high - low), 1e-12)


def _tolerance(trace: Trace) -> float:
    infos = [leaf for call in trace.calls for leaf in call.outputs if isinstance(leaf, TensorInfo)]
    return _NARROW_TOLERANCE if any(info.dtype.itemsize == 2 for info in infos) else _TOLERANCE


def _made_up_results(half: Trace, whole: Trace) -> list[dict[Key, Tensor]]:
    """Random unit results for two halves and for both: the same without a batch dimension, joined with one."""
    reseed(0, torch.device("cpu"))
    results: list[dict[Key, Tensor]] = [{}, {}, {}]
    for small, large in zip(half.calls, whole.calls, strict=True):
        for index, (one, both) in enumerate(zip(small.outputs, large.outputs, strict=True)):
            if not isinstance(one, TensorInfo):
                continue
            first, second = _made_up(one), _made_up(one)
            grown = [dim for dim, (a, b) in enumerate(zip(one.shape, both.shape, strict=True)) if a != b]
            together = torch.cat([first, second], grown[0]) if grown else first
            for store, value in zip(results, (first, second if grown else first, together), strict=True):
                store[small.index, index] = value
    return results


def _made_up(info: TensorInfo) -> Tensor:
    if not info.dtype.is_floating_point:
        return torch.zeros(info.shape, dtype=info.dtype)
    return torch.randn(info.shape).to(info.dtype)
