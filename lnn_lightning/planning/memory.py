"""Memory that each rank of a layout needs for training, predicted on one process, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lnn_lightning.parallel.data.choice import choose_units
from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.install import ExpertSharding
from lnn_lightning.parallel.layout import Layout
from lnn_lightning.parallel.pipeline.division import plan_tensor
from lnn_lightning.parallel.pipeline.engine import PipelineSettings
from lnn_lightning.parallel.pipeline.ownership import Ownership, find_ownership
from lnn_lightning.parallel.pipeline.partition import partition
from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.pipeline.spreading import find_experts
from lnn_lightning.parallel.pipeline.stage import can_split
from lnn_lightning.parallel.step.batch import batch_size_of, split_batch
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.parallel.step.materialize import defer_meta_tensors
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.standin import named_tensors
from lnn_lightning.parallel.step.trace import Trace
from lnn_lightning.parallel.step.tree import tree_tensors
from lnn_lightning.parallel.step.units import Units, find_units
from lnn_lightning.parallel.tensor.axis import TensorAxis
from lnn_lightning.parallel.tensor.install import TensorSharding
from lnn_lightning.planning.activations import KeptBytes, count_kept
from lnn_lightning.planning.compression import PlannedCompression
from lnn_lightning.planning.inflight import peak_bytes
from lnn_lightning.planning.states import Copies, Held, held, optimizer_bytes

MakeExtensions = Callable[[nn.Module, Units, Mapping[int, Sequence[str]], bool], Sequence[StepExtension]]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a rank in training.

    Attributes:
        pipeline: place along the pipeline.
        data: place along the data axis.
        parameters: of parameters and the module's buffers, between steps.
        gradients: when the optimizer steps.
        optimizer: its state, master weights among it.
        activations: most that is saved for backward at once; None: it could not be counted.
        compression: what gradient compression keeps: errors not sent yet, factors, momentum.
        buffers: for communication and recomputation: whole parameters of ZeRO's units, buckets, values that cross
            stages, what the largest recomputed unit keeps.
    """

    pipeline: int
    data: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    buffers: int
    compression: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        kept = self.parameters + self.gradients + self.optimizer + self.compression
        return kept + (self.activations or 0) + self.buffers


@dataclass(frozen=True)
class Prediction:
    """What ranks need, and what is not in it.

    Attributes:
        ranks: one entry a place along pipeline and data axis; tensor ranks hold equally much.
        microbatches: that a local batch is cut into.
        notes: what could not be known, for the user.
    """

    ranks: list[RankMemory]
    microbatches: int
    notes: list[str]


def predict(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    make_optimizers: Callable[[], Sequence[Optimizer]],
    observer: StepObserver,
    settings: PipelineSettings,
    layout: Layout,
    zero: ZeroSettings,
    make_extensions: MakeExtensions | None = None,
    copies: Copies = None,
    compression: PlannedCompression | None = None,
) -> Prediction:
    """Predicts the memory of every rank. Needs one process and, but for the module itself, no memory.

    The module is used up: it is left as a tensor rank has it.

    Args:
        root: the module, in training mode, on the CPU or the meta device.
        step: its training step on a micro-batch.
        batch: the local batch of a data rank.
        make_optimizers: makes the user's optimizers for the module as a tensor rank has it.
        observer: mutes the step.
        settings: how the step is cut and run.
        layout: sizes of the axes.
        zero: what data ranks share out.
        make_extensions: makes what is put around the units, from the module, its units, stage -> names of the units in
            it, and whether parameters are gathered unit by unit.
        copies: fp32 copies of half-precision parameters that optimizers work on.
        compression: of the gradients that data ranks average.

    Raises:
        StepError: the step cannot be followed, cut or divided.
    """
    planned = _Planned(root, step, batch, observer, settings, layout)
    notes = planned.notes
    extensions: Sequence[StepExtension] = ()
    sharding = zero.shards_parameters and layout.shard_size > 1
    if make_extensions is not None:
        stages = range(settings.placement.num_stages)
        held_by = planned.ownership.units
        of_stage = {stage: [name for name, owners in held_by.items() if stage in owners] for stage in stages}
        extensions = make_extensions(root, planned.units, of_stage, sharding)
    kept, whole = planned.count(step, observer, extensions)
    may_split = not sharding and all(each.may_split for each in extensions)
    optimizers = make_optimizers()
    ranks = []
    for pipeline in range(layout.pipeline_parallel_size):
        activations, crossing = planned.activations(pipeline, kept, whole, may_split)
        sharded = planned.sharded(pipeline, zero)
        for data in range(layout.data_parallel_size):
            place = data % layout.shard_size
            experts = planned.experts_of(data)
            tensors = planned.held(pipeline, kept, sharded, place, experts)
            parameters = {name: each for name, each in tensors.items() if name in planned.parameters}
            learning = [each for each in parameters.values() if each.learns]
            reduced = [each for name, each in parameters.items() if planned.parameters[name].requires_grad]
            by_id = {id(planned.parameters[name]): each for name, each in parameters.items()}
            dealt = (place, layout.shard_size) if zero.stage > 0 and layout.shard_size > 1 else None
            same = layout.expert_data_size
            experts_dealt = (experts.place, same) if experts is not None and zero.stage > 0 else None
            try:
                state = optimizer_bytes(optimizers, by_id, dealt, copies, experts_dealt)
            except RuntimeError as error:
                state = 0
                notes.append(f"Optimizer state is not in it: {error}.")
            ranks.append(
                RankMemory(
                    pipeline,
                    data,
                    parameters=sum(each.bytes for each in tensors.values()),
                    gradients=sum(each.bytes for each in learning),
                    optimizer=state,
                    activations=activations,
                    buffers=crossing + planned.communicated(parameters, sharded, zero),
                    compression=compression.state_bytes(reduced, pipeline, data) if compression is not None else 0,
                )
            )
    return Prediction(ranks, planned.microbatches, list(dict.fromkeys(notes)))


@dataclass(frozen=True)
class _Experts:
    """Experts of a rank.

    Attributes:
        sharding: says which, and how large its parts are.
        place: among the ranks that hold the same.
    """

    sharding: ExpertSharding
    place: int


class _Planned:
    """A module cut for a layout as the engine cuts it, without the other ranks."""

    def __init__(
        self,
        root: nn.Module,
        step: Callable[[Any], Any],
        batch: Any,
        observer: StepObserver,
        settings: PipelineSettings,
        layout: Layout,
    ) -> None:
        self.root, self.layout, self.placement = root, layout, settings.placement
        self.notes: list[str] = []
        defer_meta_tensors(root)
        self.microbatches = self.placement.microbatches(batch_size_of(batch), settings.microbatches)
        self.microbatch = split_batch(batch, self.microbatches)[0]
        stages = self.placement.num_stages
        self.units = find_units(root, stages, settings.split_points)
        self.seams = find_experts(root, layout, settings.expert)
        book = PlanBook(root, self.units, stages, observer)
        self.trace: Trace = book.trace(step, self.microbatch)
        sizes = {name: parameter.numel() for name, parameter in root.named_parameters()}
        stage_of = partition(self.trace, sizes, stages, settings.split_points)
        self.ownership: Ownership = find_ownership(root, self.units, self.trace, stage_of, stages)
        size = layout.tensor_parallel_size
        given = settings.sequence_parallel, settings.tensor_parallel_plan
        if (tensor := plan_tensor(root, self.trace, self.units, size, *given)) is not None:
            book.tensor = TensorSharding(root, tensor, TensorAxis(size, 0))
            book.tensor.install()
        device = next((tensor.device for tensor in tree_tensors(batch)), torch.device("cpu"))
        with torch.enable_grad():
            self.plan: Plan = book.cut_plan(self.trace, stage_of, device)
        self.parameters = dict(root.named_parameters())
        self._of_ranks: dict[int, ExpertSharding] = {}

    def count(
        self, step: Callable[[Any], Any], observer: StepObserver, extensions: Sequence[StepExtension]
    ) -> tuple[KeptBytes | None, KeptBytes | None]:
        """What a micro-batch leaves, and what it would without extensions; None where that cannot be counted."""
        try:
            whole = count_kept(self.root, self.plan, step, self.microbatch, observer)
            if not extensions:
                return whole, whole
            return count_kept(self.root, self.plan, step, self.microbatch, observer, extensions), whole
        except Exception as error:  # noqa: BLE001 - whatever blocks raise on tensors without data
            cause = self.trace.tail_error if not self.trace.calls else error
            self.notes.append(
                f"Activations are not in it: the step does not run on tensors without data "
                f"({type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''})."
            )
            return None, None

    def activations(
        self, pipeline: int, kept: KeptBytes | None, whole: KeptBytes | None, may_split: bool
    ) -> tuple[int | None, int]:
        """Most that is saved at once, and memory for values that cross stages and for recomputation."""
        stages = self.placement.stages_of(pipeline)
        splits = may_split and self.placement.kind.splits_backward
        split = {stage: splits and can_split(self.plan, stage) for stage in stages}
        given = self.placement, pipeline, self.microbatches
        keys = {stage: (*self.plan.received(stage), *self.plan.sent(stage)) for stage in stages}
        wires = {stage: [self.plan.wire(key) for key in each] for stage, each in keys.items()}
        crossing = {stage: sum(prod(i.shape) * i.dtype.itemsize for i in infos) for stage, infos in wires.items()}
        buffers = peak_bytes(*given, crossing, split) if self.placement.num_stages > 1 else 0
        if kept is None or whole is None:
            return None, buffers
        again = [
            size
            for stage in stages
            for call, size in whole.of_calls[stage].items()
            if size > kept.of_calls[stage].get(call, 0)
        ]
        saved = peak_bytes(*given, {stage: kept.saved[stage] for stage in stages}, split)
        return saved, buffers + max(again, default=0)

    def sharded(self, pipeline: int, zero: ZeroSettings) -> dict[str, int]:
        """Parameters that ZeRO 2 and 3 shard on a pipeline rank -> number of the group that is gathered at once."""
        if not zero.shards_parameters or self.layout.shard_size == 1:
            return {}
        stages = self.placement.stages_of(pipeline)
        groups, whole = choose_units(self.root, self.units.names, stages, self.ownership, self.trace)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        found: dict[str, int] = {}
        for number, group in enumerate(group for each in groups.values() for group in each):
            for parameter in (p for unit in group for p in self.root.get_submodule(unit).parameters()):
                if names[id(parameter)] not in whole:
                    found[names[id(parameter)]] = number
        return found

    def experts_of(self, data: int) -> _Experts | None:
        """The experts on a data rank, where experts are spread; of its tensor ranks one that has the most of them."""
        if not self.seams or not self.layout.spreads_experts:
            return None
        size = self.layout.tensor_parallel_size
        places = [self.layout.expert_place(data, tensor) for tensor in range(size)]
        same, rank = min(places, key=lambda place: place[1])  # the first ranks have one more
        if rank not in self._of_ranks:
            tensor = TensorAxis(size, 0) if size > 1 else None
            axis = ExpertAxis(
                self.layout.expert_parallel_size, rank, tensor=tensor, divides_experts=self.layout.divides_experts
            )
            self._of_ranks[rank] = ExpertSharding(self.root, self.seams, axis)
        return _Experts(self._of_ranks[rank], same)

    def held(
        self,
        pipeline: int,
        kept: KeptBytes | None,
        sharded: Mapping[str, int],
        place: int,
        experts: _Experts | None,
    ) -> dict[str, Held]:
        """Parameters and buffers on a rank, by their first names."""
        stages = set(self.placement.stages_of(pipeline))
        used = kept.used if kept is not None else None
        found: dict[str, Held] = {}
        for name, tensor in named_tensors(self.root):
            owners = self.ownership.tensors[name]
            if stages.isdisjoint(owners):
                continue
            shared = len({self.placement.rank_of(stage) for stage in owners}) > 1
            learns = name in self.parameters and tensor.requires_grad and (used is None or name in used or shared)
            if experts is not None and name in experts.sharding.names:
                if experts.sharding.lives_here(name):
                    shards = self.layout.expert_data_size if name in sharded else 1
                    part = experts.sharding.local_shape(name)
                    learns = name in self.parameters and tensor.requires_grad  # any may get tokens
                    found[name] = held(tensor, learns, shards, experts.place, part, apart=True)
                continue
            found[name] = held(tensor, learns, self.layout.shard_size if name in sharded else 1, place)
        return found

    def communicated(self, parameters: Mapping[str, Held], sharded: Mapping[str, int], zero: ZeroSettings) -> int:
        """Whole parameters and gradients of ZeRO's units, and the buckets of gradients that data ranks average."""
        reduced = [self.layout.data_parallel_size > 1, self.layout.expert_data_size > 1]
        whole_ones = [each for each in parameters.values() if each.learns and not each.sharded]
        buckets = sum(each.bytes for each in whole_ones if reduced[each.apart])
        groups: dict[int, int] = {}
        for name, number in sharded.items():
            if name not in parameters or not parameters[name].sharded:  # experts of others, or of this rank alone
                continue
            groups[number] = groups.get(number, 0) + parameters[name].whole_bytes
        if not groups:
            return buckets
        # a block and the one gathered ahead; gradients of several micro-batches are added up whole
        two = sum(sorted(groups.values())[-2:])
        several = self.microbatches > 1
        held_open = zero.stage == 2 or (several and not zero.reshard_between_microbatches)
        whole = sum(groups.values())
        return buckets + (whole if held_open else two) + (whole if several else two)
