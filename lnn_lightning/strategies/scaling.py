"""Gradient scales of blocks, put around the steps of an engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lnn_lightning.optim.block_scales import BlockScales, scaled_blocks
from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.parallel.expert.layer import moe_layers
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.precision import MeshMixedPrecision


def scale_blocks(engine: PipelineEngine, plugin: Any, device: torch.device) -> None:
    """Gives the blocks of a divided module gradient scales, once, if the precision plugin asks for them.

    Raises:
        LayoutError: layers of experts have losses of their own.
        StepError: the strategy divides gradients in a way that scales of blocks do not follow.
    """
    settings = plugin.gradient_scales if isinstance(plugin, MeshMixedPrecision) else None
    if settings is None or any(isinstance(extension, BlockScales) for extension in engine.extensions):
        return
    if balanced := [name for name, layer in moe_layers(engine.root).items() if layer.has_losses]:
        raise LayoutError(
            f"`gradient_scales` of blocks and the balancing losses of upcycled experts (`upcycle.aux_loss` and "
            f"`upcycle.z_loss`, in {balanced[0]!r}) do not go together: these get into the gradients within a block, "
            "past its scale, and would weigh too little. Leave `gradient_scales` out, or set `aux_loss=0` and "
            "`z_loss=0` (the gate 'bias' balances without a loss)."
        )
    if engine.placement.kind.splits_backward:
        raise StepError(
            "`gradient_scales` of blocks need the schedule 1f1b or interleaved: a backward in two halves has no end of "
            "a block. Or leave `gradient_scales` out."
        )
    trace = engine.first_trace
    elsewhere = {*trace.tail_parameters, *trace.everywhere}.union(*(call.glue_parameters for call in trace.calls))
    blocks = scaled_blocks(engine.root, engine.book.units.names, elsewhere)
    everywhere: list[Any] = [blocks] * dist.get_world_size()
    dist.all_gather_object(everywhere, blocks)  # a rank sees hooks on the parameters that it holds
    writing = {call.group for call in trace.calls if call.writes}  # hands on what it computes in other ways
    blocks = [block for block in blocks if block not in writing and all(block in others for others in everywhere)]
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    scales = BlockScales(blocks, settings, device, group)
    engine.extensions.insert(0, scales)  # what runs again within a block's backward is inside of the scale
    assert plugin.scaler is not None
    plugin.scaler.blocks = scales
