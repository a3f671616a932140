"""Forward only: evaluation and prediction, for any placement of the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.parallel.pipeline.schedules import Placement
from lnn_lightning.parallel.step.plan import Plan


def forward_only(
    plans: Sequence[Plan],
    placement: Placement,
    rank: int,
    run: Callable[[int, Sequence[Tensor], int], tuple[Tensor, ...]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Runs this rank's stages on every micro-batch in order.

    ``torch.distributed.pipelining`` has ``schedule.eval``, but it asserts on V-shaped schedules and breaks a later
    ``step``.

    Args:
        plans: plans of the micro-batches.
        placement: where the stages sit.
        rank: this rank's place along the pipeline.
        run: ``run(stage, received, micro_batch)`` gives what the stage sends.
        group: ranks of the pipeline.
        device: device of the values.
    """
    sending: list[tuple[Any, Tensor]] = []
    for index, plan in enumerate(plans):
        handed: tuple[Tensor, ...] = ()
        for stage in placement.stages_of(rank):
            if stage > 0 and placement.rank_of(stage - 1) != rank:
                handed = _receive(plan, stage, placement, group, device)
            handed = run(stage, handed if stage > 0 else (), index)
            if stage < placement.num_stages - 1 and (target := placement.rank_of(stage + 1)) != rank:
                sending += [(dist.isend(value, group=group, group_dst=target), value) for value in handed]
    for work, _ in sending:
        work.wait()


def _receive(
    plan: Plan, stage: int, placement: Placement, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, ...]:
    values = []
    for key in plan.received(stage):
        info = plan.wire(key)
        value = torch.empty(info.shape, dtype=info.dtype, device=device)
        dist.recv(value, group=group, group_src=placement.rank_of(stage - 1))
        values.append(value)
    return tuple(values)
