"""The pipeline engine: an ordinary module and its step, run as stages. Plain torch, usable without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.data.counts import common_size
from lnn_lightning.parallel.data.replicas import Replicas
from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.data.sharding import Sharding
from lnn_lightning.parallel.expert.settings import ExpertParallel
from lnn_lightning.parallel.layout import DATA, PIPELINE, Mesh
from lnn_lightning.parallel.pipeline.forward import forward_only
from lnn_lightning.parallel.pipeline.ownership import Ownership
from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.pipeline.probe import LossForm, find_loss_form
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.parallel.pipeline.schedules import Placement
from lnn_lightning.parallel.pipeline.setup import set_up, shard_engine
from lnn_lightning.parallel.pipeline.spreading import find_experts, keeps_pace
from lnn_lightning.parallel.pipeline.stage import WatchedStage
from lnn_lightning.parallel.pipeline.train_step import EVALUATION, TRAINING, Step, StepResult, TrainStep
from lnn_lightning.parallel.reduction import GradientReduction
from lnn_lightning.parallel.step.batch import batch_size_of, own_copy, split_batch
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.parallel.step.materialize import defer_meta_tensors
from lnn_lightning.parallel.step.observer import StepObserver
from lnn_lightning.parallel.step.plan import Plan
from lnn_lightning.parallel.step.randomness import preserved_rng, seed_of
from lnn_lightning.parallel.step.run import StepRunner
from lnn_lightning.parallel.step.trace import Trace
from lnn_lightning.parallel.step.units import find_units
from lnn_lightning.parallel.watch.activity import doing


@dataclass(frozen=True)
class PipelineSettings:
    """How the engine cuts and runs a step.

    Attributes:
        placement: schedule, ranks and stages on each.
        microbatches: micro-batches a local batch is cut into for training; ``"auto"``: by the schedule.
        evaluation_microbatches: the same without gradients. One gives exactly what one process gives.
        split_points: names of the sub-modules that begin a stage; None: balanced by cost.
        sequence_parallel: values between blocks stay divided along their tokens over the tensor ranks.
        tensor_parallel_plan: glob of layer names -> role, where the planner is not to decide.
        reduce_dtype: in which ranks add up gradients; None: their own, but fp32 for half precision.
        expert: how experts are spread over ranks; None: they are not.
    """

    placement: Placement
    microbatches: int | str = "auto"
    evaluation_microbatches: int = 1
    split_points: Sequence[str] | None = None
    sequence_parallel: bool = False
    tensor_parallel_plan: Mapping[str, str] | None = None
    reduce_dtype: torch.dtype | None = None
    expert: ExpertParallel | None = None


class PipelineEngine:
    """Runs a module's own step as the stages of a pipeline.

    Args:
        root: the module; its sub-modules become the units.
        settings: how to cut and run.
        mesh: this process's place.
        observer: told when a run of the step counts.
        seed: seed of all random numbers drawn inside steps; equal on all ranks.
    """

    def __init__(
        self, root: nn.Module, settings: PipelineSettings, mesh: Mesh, observer: StepObserver, seed: int = 0
    ) -> None:
        self.root, self.settings, self.mesh, self.observer, self.seed = root, settings, mesh, observer, seed
        self.placement = settings.placement
        self.rank = mesh.rank(PIPELINE)
        self.last_rank = self.placement.rank_of(self.placement.num_stages - 1)
        self.stages = self.placement.stages_of(self.rank)
        self.steps_done = [0, 0]
        self.residence: Residence
        self.loss_form: LossForm | None = None
        self.deferred = defer_meta_tensors(root)
        self.unset: set[str] | None = None
        """Set to an empty set if values follow: gets the names of what was on the meta device and has none yet."""
        self.seams = find_experts(root, mesh.layout, settings.expert)
        self._keeps_pace = keeps_pace(root, mesh)
        units = find_units(root, self.placement.num_stages, settings.split_points)
        self.book = PlanBook(root, units, self.placement.num_stages, observer)
        modules = {name: root.get_submodule(name) for name in self.book.groups}
        self.runner = StepRunner(modules)
        self._schedules: dict[int, tuple[Any, list[WatchedStage]]] = {}
        self._replicas = Replicas(mesh, settings.reduce_dtype)
        self.sharding: Sharding | None = None
        self.loss_scale = 1.0
        """Part of the factor on the loss that the loss scaler has put in."""
        self.first_trace: Trace
        self._current: TrainStep | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.rank == self.last_rank

    @property
    def scale(self) -> float:
        """Factor on the loss within the training step in progress."""
        assert self._current is not None
        return self._current.scale

    @property
    def extensions(self) -> list[StepExtension]:
        """What is put around the runs of its steps, the first one outermost."""
        return self.runner.extensions

    @property
    def ownership(self) -> Ownership:
        """Which stages hold what."""
        return self.residence.ownership

    # ---------------------------------------------------------------- setup

    def prepare(self, kind: str, step: Step, batch: Any, training: bool) -> Plan:
        """Traces a step, decides the stages and drops what lives elsewhere. Collective over all ranks.

        Raises:
            StepError: the step cannot be followed or cut (on all ranks).
        """
        return set_up(self, kind, step, batch, training)

    def find_loss_form(self, step: Step, batch: Any) -> None:
        """Finds out how the loss adds up over samples; once before training. Collective over all ranks."""
        form: LossForm = "mean"
        whole = len(self.split(batch, training=True)) * self.mesh.size(DATA) == 1
        if self.is_last and not whole:
            form = find_loss_form(self.book, self.runner, self.observer, step, batch)
        decision = [form]
        source = self.mesh.layout.rank_of(self.last_rank, 0, 0)
        dist.broadcast_object_list(decision, src=source, device=self.communication_device())
        self.loss_form = decision[0]

    def shard(self, settings: ZeroSettings) -> None:
        """ZeRO 2 and 3: shards this rank's units over the data ranks; call when parameters are on their device."""
        self.residence.dealt = settings.stage > 0
        if self.sharding is not None:
            self.sharding.link()
        elif settings.shards_parameters and self.mesh.layout.shard_size > 1:
            self.sharding = shard_engine(self, settings)

    @property
    def reduction(self) -> GradientReduction | None:
        """How gradients are averaged over data ranks; None: by an all-reduce. Set it before training."""
        return self._replicas.reduction

    @reduction.setter
    def reduction(self, reduction: GradientReduction | None) -> None:
        self._replicas.reduction = reduction

    def setup_training(self) -> None:
        """Makes what training needs besides the module; call when parameters are on their device."""
        self._replicas.adopt(self.residence, overlap=self.placement.num_stages == 1 and self.sharding is None)

    def split(self, batch: Any, training: bool) -> list[Any]:
        """The micro-batches of a local batch. Collective over the data ranks if blocks of these meet in it."""
        wanted = self.settings.microbatches if training else self.settings.evaluation_microbatches
        if not training and wanted == 1:
            return split_batch(batch, 1)
        size = batch_size_of(batch)
        if self._keeps_pace and self.placement.cuts(wanted):
            size = common_size(size, self.mesh.group(DATA), self.communication_device())
        return split_batch(batch, self.placement.microbatches(size, wanted))

    # ---------------------------------------------------------------- training

    def train_step(
        self, kind: str, step: Step, batch: Any, device: torch.device, scale: float, sync: bool
    ) -> StepResult:
        """Forward and backward of all micro-batches by the schedule; gradients are added to ``parameter.grad``.

        Args:
            kind: name of the step, for messages.
            step: the user's step on a micro-batch; returns a loss or a dict with one.
            batch: the local batch.
            device: device of the values.
            scale: factor on the loss within (loss scaling, accumulation); the result's loss is without it.
            sync: reduce the gradients over data ranks and stages that share parameters behind this step.

        Raises:
            StepError: the step cannot be run as planned.
        """
        current = TrainStep(self, kind, step, batch, device, scale)
        self._current = current
        if sync:
            self.setup_training()
            if self.reduction is not None:
                self.reduction.scaled(self.loss_scale)
            self._replicas.begin()
        self._armable = sync and self.placement.num_stages == 1 and self.sharding is None
        schedule, stages = self._schedule(current.plans, device)
        if self.sharding is not None:
            for plan in current.plans:
                self.sharding.check(kind, plan.trace)
            self.sharding.begin(len(current.plans))
        self._sync = sync
        try:
            for extension in self.extensions:
                extension.begin(len(current.plans), training=True)
            with preserved_rng(device), self.runner.opened():
                current.weigh()
                for stage in stages:
                    stage.load(current.plans)
                index = torch.arange(len(current.plans))
                schedule.step(mb=index, target=index, losses=[], return_outputs=False)
            if self.sharding is not None:
                self.sharding.finish(sync)
        except BaseException:
            if self.sharding is not None:
                self.sharding.abandon()
            self._schedules.clear()  # they hold what the forwards of this step have left for its backwards
            raise
        finally:
            self._current = None
            for extension in self.extensions:
                extension.finish()
        if sync:
            doing("summing gradients over ranks")
            self._replicas.finish()
            self.residence.settle_gradients(self.settings.reduce_dtype)
            self.residence.sum_shared_gradients(self.settings.reduce_dtype)
        self.steps_done[TRAINING] += 1
        return current.result()

    def _schedule(self, plans: Sequence[Plan], device: torch.device) -> tuple[Any, list[WatchedStage]]:
        count = len(plans)
        if count not in self._schedules:
            stages = [
                WatchedStage(
                    stage,
                    plans[0],
                    self._run_stage,
                    self.residence.parameters(stage),
                    device,
                    self.mesh.group(PIPELINE),
                    self._during_backward,
                    self._before_last_backward,
                    self._before_backward,
                    may_split=self.sharding is None and all(each.may_split for each in self.extensions),
                )
                for stage in self.stages
            ]
            self._schedules[count] = (self.placement.build(stages, count), stages)
        return self._schedules[count]

    @contextmanager
    def _during_backward(self, stage: int, index: int) -> Iterator[None]:
        assert self._current is not None
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.backward(stage, index))
            plan, seed = self._current.plans[index], self.seed_for(TRAINING, index)
            stack.enter_context(self.runner.backward(plan, stage, seed))
            yield

    def _before_backward(self, stage: int, last: bool) -> None:
        if self.sharding is not None:
            self.sharding.before_backward(stage, last, self._sync)

    def _before_last_backward(self, outputs: Any) -> None:
        if self._armable:
            self._replicas.arm(outputs)

    def _run_stage(self, stage: int, received: Sequence[Tensor], index: int) -> Any:
        assert self._current is not None
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.forward(stage, index))
            return self._current.run(stage, received, index)

    def seed_for(self, phase: int, index: int) -> int:
        """Seed of a micro-batch of the current step."""
        return seed_of(self.seed, phase, self.steps_done[phase], self.mesh.rank(DATA), index)

    # ---------------------------------------------------------------- without gradients

    def forward_step(self, kind: str, step: Step, batch: Any, device: torch.device) -> StepResult:
        """Forward of all micro-batches; the step's results are on the last stage's rank."""
        if self.sharding is None:
            return self._forward_step(kind, step, batch, device)
        # what is gathered in inference mode could not be trained with
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._forward_step(kind, step, batch, device)
            finally:
                self.sharding.finish(sync=False)

    def _forward_step(self, kind: str, step: Step, batch: Any, device: torch.device) -> StepResult:
        parts = self.split(batch, training=False)
        plans = [self.book.plan(kind, step, part, device) for part in parts]
        outputs: list[Any] = []
        if self.sharding is not None:
            self.sharding.begin(len(parts))
            for plan in plans:
                self.sharding.hold_open(plan.trace)

        def run(stage: int, received: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
            doing("%s of micro-batch %d, stage %d", kind, index, stage)
            last = stage == self.placement.num_stages - 1
            part = own_copy(parts[index]) if plans[index].trace.mutates_batch else parts[index]
            with self.observer.recording(index) if last else self.observer.passing(undo=self.is_last):
                seed = self.seed_for(EVALUATION, index)
                sent, result = self.runner.run_stage(plans[index], stage, received, lambda: step(part), seed, index)
            if last:
                outputs.append(result)
            return sent

        try:
            for extension in self.extensions:
                extension.begin(len(parts), training=False)
            with preserved_rng(device), self.runner.opened():
                forward_only(plans, self.placement, self.rank, run, self.mesh.group(PIPELINE), device)
        finally:
            for extension in self.extensions:
                extension.finish()
        self.steps_done[EVALUATION] += 1
        return StepResult(None, outputs, [1 / len(parts)] * len(parts))

    @contextmanager
    def absent_step(self, kind: str, step: Step, batch: Any, device: torch.device) -> Iterator[Any]:
        """Every unit is absent inside, but within :meth:`suspended`; yields a micro-batch to run the step on."""
        part = self.split(batch, training=True)[0]
        plan = self.book.plan(kind, step, part, device)
        with preserved_rng(device), self.runner.opened():
            with self.runner.all_absent(plan, self.seed_for(TRAINING, 0)):
                yield part

    def suspended(self) -> AbstractContextManager[None]:
        """Steps may be run inside of :meth:`absent_step`."""
        return self.runner.suspended()

    def communication_device(self) -> torch.device:
        """Where ranks talk to each other."""
        if dist.get_backend() == "gloo":
            return torch.device("cpu")
        return torch.device(self.mesh.device_mesh.device_type, torch.accelerator.current_device_index())
