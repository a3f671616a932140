"""Weights that make a result over micro-batches and data ranks that of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.pipeline.probe import LossForm
from lnn_lightning.parallel.step.batch import batch_size_of
from lnn_lightning.parallel.step.losses import LossCall, counted_losses
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.tree import tree_leaves


@dataclass(frozen=True)
class Weights:
    """How the last stage weighs its micro-batches.

    Attributes:
        microbatch: weight of one micro-batch's loss. They add up to one, times the batch's share where data ranks have
            batches of different sizes; for a loss that is a sum they undo the averaging over data ranks.
        losses: what the sum of each mean loss over a micro-batch is multiplied with; None: means are right as they are.
    """

    microbatch: float
    losses: tuple[float, ...] | None = None


def weigh(
    batch: Any,
    microbatches: Sequence[Any],
    plans: Sequence[Plan],
    dry_run: Callable[[int], AbstractContextManager[Callable[[], Any]]],
    form: LossForm,
    data_group: dist.ProcessGroup,
    device: torch.device,
) -> Weights:
    """Weights of a step's micro-batches. Collective over the last stage's data ranks.

    Args:
        batch: the local batch.
        microbatches: its parts.
        plans: their plans.
        dry_run: ``dry_run(i)`` opens a context and gives a function that runs the step on micro-batch ``i`` with every
            unit absent.
        form: how the loss adds up over samples.
        data_group: ranks that run the last stage on other data.
        device: device for the collectives.

    Raises:
        StepError: targets are ignored within a unit, where they cannot be counted beforehand.
    """
    ranks = dist.get_world_size(data_group)
    count = len(microbatches)
    calls = plans[0].trace.losses
    size = float(batch_size_of(batch) or 1)
    doubtful = count * ranks > 1 and _may_ignore(calls, batch)
    totals = torch.tensor([size, float(doubtful)], dtype=torch.float64)
    if ranks > 1:
        totals = _summed(totals, data_group, device)
    weight = float(ranks) if form == "sum" else size * ranks / float(totals[0]) / count
    if not totals[1] or form == "other" or plans[0].trace.tail_error is not None:
        return Weights(weight)
    counts = torch.stack([_count(index, len(calls), dry_run) for index in range(count)])
    whole = counts.sum(0)
    if ranks > 1:
        whole = _summed(whole, data_group, device)
    if bool((counts * count * ranks == whole).all()):
        return Weights(weight)
    return Weights(weight, tuple((ranks / (whole * weight)).tolist()))


def _may_ignore(calls: Sequence[LossCall], batch: Any) -> bool:
    """Whether a mean loss of the step may skip targets of this batch."""
    leaves = tree_leaves(batch)
    whole = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.dtype.is_floating_point]
    if any(call.inside for call in calls) and any(not call.inside for call in calls):
        calls = [replace(call, batch_leaf=None, inside=True) for call in calls]  # cannot be told apart when counted
    for call in calls:
        targets = [leaves[call.batch_leaf]] if call.batch_leaf is not None else whole
        holds = any(bool((leaf == call.ignore_index).any()) for leaf in targets)
        if call.inside and (holds or call.weighted):
            raise StepError(
                f"A block computes a mean loss itself, with class weights or ignored targets ({call.ignore_index}): "
                "its mean over a micro-batch is not the whole batch's. Compute the loss outside of the block (in "
                "training_step or the model's forward), or set `microbatches=1`."
            )
        if not call.inside and (holds or call.weighted or call.batch_leaf is None):
            return True
    return False


def _count(index: int, calls: int, dry_run: Callable[[int], AbstractContextManager[Callable[[], Any]]]) -> Tensor:
    counts: list[Tensor] = []
    error: Exception | None = None
    with dry_run(index) as run, counted_losses(counts):
        try:
            run()
        except StepError:
            raise
        except Exception as caught:  # noqa: BLE001 - the tail behind the losses may need values that are not there
            error = caught
    outside = [count.cpu() for count in counts if not bool(count.isnan())]
    if len(counts) < calls:
        raise StepError(
            f"The step could not be followed to its loss to count its valid targets ({error}). Set `microbatches=1`."
        ) from error
    return torch.stack(outside) if outside else torch.zeros(0, dtype=torch.float64)


def _summed(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    values = values.to(device)
    dist.all_reduce(values, group=group)
    return values.cpu()
