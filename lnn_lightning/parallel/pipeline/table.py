"""The layout as a table for people."""

from __future__ import annotations

from math import prod

from lnn_lightning.parallel.pipeline.partition import bytes_of
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.parallel.pipeline.schedules import Placement
from lnn_lightning.parallel.step.plan import Plan


def layout_table(
    plan: Plan, residence: Residence, placement: Placement, batch_size: int | None = None, microbatches: int = 1
) -> str:
    """One line a stage: rank, units, parameters, and the values sent to the next stage for one micro-batch.

    Args:
        plan: the cut step.
        residence: knows the parameters of the stages.
        placement: schedule and ranks.
        batch_size: samples of the batch that was traced.
        microbatches: parts it is cut into.
    """
    sizes = {name: prod(residence.whole_shape(name, each)) for name, each in residence.root.named_parameters()}
    total_flops = sum(call.flops for call in plan.trace.calls) or 1
    rows = [("stage", "rank", "units", "parameters", "work", "sends")]
    for stage in range(plan.num_stages):
        calls = [call for call in plan.trace.calls if plan.stage_of[call.index] == stage]
        units = list(dict.fromkeys(call.unit for call in calls))
        held = sum(size for name, size in sizes.items() if stage in residence.ownership.tensors[name])
        work = sum(call.flops for call in calls) / total_flops
        keys = plan.sent(stage)
        values = [f"{plan.trace.calls[index].unit}{list(plan.wire((index, leaf)).shape)}" for index, leaf in keys]
        sends = (
            f"{', '.join(values)} ({sum(bytes_of(plan.wire(key)) for key in keys) / 2**20:.2f} MiB)" if keys else "-"
        )
        rows.append((str(stage), str(placement.rank_of(stage)), _range(units), f"{held:,}", f"{work:.0%}", sends))
    shared = [name for name in sizes if len(residence.ownership.tensors[name]) > 1]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    title = f"Pipeline layout: schedule {placement.name}, {plan.num_stages} stage(s) on {placement.ranks} rank(s)"
    if batch_size is not None:
        title += f"; a batch of {batch_size} samples in {microbatches} micro-batch(es) of {batch_size // microbatches}"
    note = [f"on several stages, gradients summed: {', '.join(shared)}"] if shared else []
    return "\n".join([title, *lines, *note])


def _range(units: list[str]) -> str:
    if not units:
        return "-"
    return units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]} ({len(units)})"
