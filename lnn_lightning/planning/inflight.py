"""Micro-batches whose activations a rank holds at once, from the order of work of its schedule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from lnn_lightning.parallel.pipeline.schedules import Placement

_FORWARD = (_ComputationType.FORWARD,)
_WHOLE = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT)
_SPLIT = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT)


class _Place:
    """What torch's schedules ask a stage for when they lay out their work."""

    device, group, has_backward = torch.device("cpu"), None, True
    group_rank = 0

    def __init__(self, stage: int, placement: Placement) -> None:
        self.stage_index, self.num_stages, self.group_size = stage, placement.num_stages, placement.ranks
        self.is_first, self.is_last = stage == 0, stage == placement.num_stages - 1
        self.stage_index_to_group_rank: dict[int, int] | None = None
        self.submod = nn.Identity()


def order_of_work(placement: Placement, rank: int, microbatches: int) -> list[_Action]:
    """Forwards and backwards of a rank in the order in which its schedule does them."""
    if placement.num_stages == 1:
        kinds = (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD)
        if placement.kind.single == "ScheduleGPipe":
            return [_Action(0, kind, index) for kind in kinds for index in range(microbatches)]
        return [_Action(0, kind, index) for index in range(microbatches) for kind in kinds]
    schedule = placement.build([_Place(stage, placement) for stage in placement.stages_of(rank)], microbatches)
    return [action for action in schedule.pipeline_order[rank] if action is not None]


def peak_bytes(
    placement: Placement,
    rank: int,
    microbatches: int,
    bytes_of: Mapping[int, int],
    split: Mapping[int, bool] | None = None,
) -> int:
    """Most bytes a rank holds at once, if each of its stages keeps so many from a forward to its backward.

    Args:
        placement: the schedule on its ranks.
        rank: place along the pipeline.
        microbatches: micro-batches of a step.
        bytes_of: bytes by stage.
        split: stages whose weight backward is made apart: they keep everything until then.
    """
    held = most = 0
    for action in order_of_work(placement, rank, microbatches):
        stage = action.stage_index
        if action.computation_type in _FORWARD:
            held += bytes_of.get(stage, 0)
            most = max(most, held)
        elif action.computation_type in (_SPLIT if split and split.get(stage) else _WHOLE):
            held -= bytes_of.get(stage, 0)
    return most
