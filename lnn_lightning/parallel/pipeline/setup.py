"""Making an engine ready: the step is traced, stages are decided, what lives elsewhere goes, the rest is divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lnn_lightning.parallel.data.choice import shard_units
from lnn_lightning.parallel.data.compressed import compress_shards
from lnn_lightning.parallel.data.replicate import refuse_renormalised
from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.data.sharding import Sharding
from lnn_lightning.parallel.data.shards import Apart
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.exchange import agree
from lnn_lightning.parallel.layout import DATA, EXPERT_DATA, HYBRID, TENSOR
from lnn_lightning.parallel.pipeline.division import divide, plan_tensor, warn_once
from lnn_lightning.parallel.pipeline.ownership import find_ownership
from lnn_lightning.parallel.pipeline.partition import partition
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.parallel.pipeline.spreading import spread_experts
from lnn_lightning.parallel.pipeline.train_step import Step
from lnn_lightning.parallel.step.plan import Plan

if TYPE_CHECKING:
    from lnn_lightning.parallel.pipeline.engine import PipelineEngine


def set_up(engine: PipelineEngine, kind: str, step: Step, batch: Any, training: bool) -> Plan:
    """Traces a step, decides the stages and drops what lives elsewhere. Collective over all ranks.

    Raises:
        StepError: the step cannot be followed or cut (on all ranks).
    """
    root, settings, mesh, placement = engine.root, engine.settings, engine.mesh, engine.placement
    error: BaseException | None = None
    try:
        microbatch = engine.split(batch, training)[0]
        if training and mesh.size(DATA) > 1:
            refuse_renormalised(root)
        with _as_in_step(root, training):
            trace = engine.book.trace(step, microbatch)
        sizes = {name: parameter.numel() for name, parameter in root.named_parameters()}
        stage_of = partition(trace, sizes, placement.num_stages, settings.split_points)
        decision = [(trace.names, stage_of, engine.seams)]
    except Exception as caught:  # noqa: BLE001 - told to all ranks below
        error = caught
    world = dist.group.WORLD
    comm_device = engine.communication_device()
    agree(error, world, comm_device)
    dist.broadcast_object_list(decision, src=0, device=comm_device)
    names, stage_of, seams = decision[0]
    try:
        if names != trace.names:
            raise StepError(
                f"The step calls {list(trace.names)} on rank {dist.get_rank()} and {list(names)} on rank 0: all "
                f"ranks must run the same model and the same step."
            )
        if seams != engine.seams:
            here, there = ([seam.name for seam in each] for each in (engine.seams, seams))
            raise StepError(
                f"Blocks of experts are {here} on rank {dist.get_rank()} and {there} on rank 0: all ranks must build "
                "the same model, with the same weights (`seed_everything`)."
            )
        ownership = find_ownership(root, engine.book.units, trace, stage_of, placement.num_stages)
        given = settings.sequence_parallel, settings.tensor_parallel_plan
        plan_layers = partial(plan_tensor, root, trace, engine.book.units, mesh.size(TENSOR), *given)
        tensor = plan_layers()
    except Exception as caught:  # noqa: BLE001
        error = caught
    agree(error, world, comm_device)
    engine.book.decide(kind, names, stage_of, ownership)
    residence = engine.residence = Residence(root, ownership, placement, mesh, engine.book)
    try:
        residence.settle(engine.seed if engine.deferred else None, engine.unset)
    except Exception as caught:  # noqa: BLE001
        error = caught
    agree(error, world, comm_device)
    residence.make_equal()
    if tensor is not None:
        with _as_in_step(root, training):
            divided = divide(root, tensor, trace, mesh, comm_device, plan_layers)
        residence.tensor = engine.book.tensor = divided
    if engine.seams:
        with _as_in_step(root, training):
            residence.expert = spread_experts(root, engine.seams, mesh, settings.expert, comm_device)
        engine.book.expert = residence.expert
    engine.first_trace = trace
    with torch.set_grad_enabled(training):
        return engine.book.cut_plan(trace, stage_of, torch.device("cpu"))


def shard_engine(engine: PipelineEngine, settings: ZeroSettings) -> Sharding:
    """Shards the units of an engine's stages over the data ranks. Collective over all processes."""
    residence, experts = engine.residence, engine.mesh.experts
    apart = None
    if residence.expert is not None and experts is not None:
        sizes = {name: residence.expert.whole_shape(name).numel() for name in residence.expert.names}
        apart = Apart(sizes, experts[EXPERT_DATA])
    mesh = engine.mesh.sharding
    over = mesh[HYBRID[1]] if engine.reduction is not None and mesh.ndim > 1 else mesh
    made = shard_units(
        *(engine.root, engine.book.units.names, engine.stages, engine.ownership, engine.first_trace),
        *(over, settings, engine.mesh.group(DATA), engine.settings.reduce_dtype, apart),
    )
    if engine.reduction is not None and (plain := compress_shards(made, mesh, engine.reduction)):
        warn_once(
            f"Gradients of experts ({plain[0]!r} and {len(plain) - 1} more) are averaged without compression: "
            "`zero_stage` 2 and 3 reduce and scatter them over all ranks that hold them, which this "
            "`gradient_compression` cannot do. With `zero_stage=1` they are compressed too."
        )
    residence.sharding = made
    engine.book.whole_shapes = made.whole_shapes
    return made


@contextmanager
def _as_in_step(root: nn.Module, training: bool) -> Iterator[None]:
    """Gradients and modes as a step of training or evaluation has them."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(training))
        if not training:
            stack.enter_context(evaluating(root))
        yield


@contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; each sub-module's own mode again behind it."""
    modes = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
