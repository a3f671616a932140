"""The pipeline engine: an ordinary module and its step, run as stages. Plain torch, usable without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.data.choice import shard_units
from lnn_lightning.parallel.data.replicate import Replica, refuse_renormalised
from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.data.sharding import Sharding
from lnn_lightning.parallel.data.shards import is_sharded
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.exchange import agree
from lnn_lightning.parallel.layout import DATA, PIPELINE, TENSOR, Mesh
from lnn_lightning.parallel.pipeline.division import divide, plan_tensor
from lnn_lightning.parallel.pipeline.forward import forward_only
from lnn_lightning.parallel.pipeline.ownership import Ownership, find_ownership
from lnn_lightning.parallel.pipeline.partition import partition
from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.pipeline.probe import LossForm, find_loss_form
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.parallel.pipeline.schedules import Placement
from lnn_lightning.parallel.pipeline.stage import WatchedStage
from lnn_lightning.parallel.pipeline.train_step import EVALUATION, TRAINING, Step, StepResult, TrainStep
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
    """

    placement: Placement
    microbatches: int | str = "auto"
    evaluation_microbatches: int = 1
    split_points: Sequence[str] | None = None
    sequence_parallel: bool = False
    tensor_parallel_plan: Mapping[str, str] | None = None
    reduce_dtype: torch.dtype | None = None


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
        self._deferred = defer_meta_tensors(root)
        self.unset: set[str] | None = None
        """Set to an empty set if values follow: gets the names of what was on the meta device and has none yet."""
        units = find_units(root, self.placement.num_stages, settings.split_points)
        self.book = PlanBook(root, units, self.placement.num_stages, observer)
        modules = {name: root.get_submodule(name) for name in self.book.groups}
        self.runner = StepRunner(modules)
        self._schedules: dict[int, tuple[Any, list[WatchedStage]]] = {}
        self._replica: Replica | None = None
        self.sharding: Sharding | None = None
        self._trace: Trace
        self._current: TrainStep | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.rank == self.last_rank

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
        device = torch.device("cpu")
        error: BaseException | None = None
        try:
            if training and self.mesh.size(DATA) > 1:
                refuse_renormalised(self.root)
            microbatch = self.split(batch, training)[0]
            with torch.set_grad_enabled(training), nullcontext() if training else evaluating(self.root):
                trace = self.book.trace(step, microbatch)
            sizes = {name: parameter.numel() for name, parameter in self.root.named_parameters()}
            stage_of = partition(trace, sizes, self.placement.num_stages, self.settings.split_points)
            decision = [(trace.names, stage_of)]
        except Exception as caught:  # noqa: BLE001 - told to all ranks below
            error = caught
        world = dist.group.WORLD
        comm_device = self._communication_device()
        agree(error, world, comm_device)
        dist.broadcast_object_list(decision, src=0, device=comm_device)
        names, stage_of = decision[0]
        try:
            if names != trace.names:
                raise StepError(
                    f"The step calls {list(trace.names)} on rank {dist.get_rank()} and {list(names)} on rank 0: all "
                    f"ranks must run the same model and the same step."
                )
            ownership = find_ownership(self.root, self.book.units, trace, stage_of, self.placement.num_stages)
            given = self.settings.sequence_parallel, self.settings.tensor_parallel_plan
            plan_layers = partial(plan_tensor, self.root, trace, self.book.units, self.mesh.size(TENSOR), *given)
            tensor = plan_layers()
        except Exception as caught:  # noqa: BLE001
            error = caught
        agree(error, world, comm_device)
        self.book.decide(kind, names, stage_of, ownership)
        self.residence = Residence(self.root, ownership, self.placement, self.mesh, self.book)
        try:
            self.residence.settle(self.seed if self._deferred else None, self.unset)
        except Exception as caught:  # noqa: BLE001
            error = caught
        agree(error, world, comm_device)
        self.residence.make_equal()
        if tensor is not None:
            with torch.set_grad_enabled(training), nullcontext() if training else evaluating(self.root):
                divided = divide(self.root, tensor, trace, self.mesh, comm_device, plan_layers)
            self.residence.tensor = self.book.tensor = divided
        self._trace = trace
        with torch.set_grad_enabled(training):
            return self.book.cut_plan(trace, stage_of, device)

    def find_loss_form(self, step: Step, batch: Any) -> None:
        """Finds out how the loss adds up over samples; once before training. Collective over all ranks."""
        form: LossForm = "mean"
        whole = len(self.split(batch, training=True)) * self.mesh.size(DATA) == 1
        if self.is_last and not whole:
            form = find_loss_form(self.book, self.runner, self.observer, step, batch)
        decision = [form]
        source = self.mesh.layout.rank_of(self.last_rank, 0, 0)
        dist.broadcast_object_list(decision, src=source, device=self._communication_device())
        self.loss_form = decision[0]

    def shard(self, settings: ZeroSettings) -> None:
        """ZeRO 2 and 3: shards this rank's units over the data ranks; call when parameters are on their device."""
        if self.sharding is not None:
            self.sharding.link()
            return
        if not settings.shards_parameters or self.mesh.layout.shard_size == 1:
            return
        self.sharding = self.residence.sharding = shard_units(
            *(self.root, self.book.units.names, self.stages, self.ownership, self._trace, self.mesh.sharding, settings),
            self.mesh.group(DATA),
            self.settings.reduce_dtype,
        )
        self.book.whole_shapes = self.sharding.whole_shapes

    def setup_training(self) -> None:
        """Makes what training needs besides the module; call when parameters are on their device."""
        if self.mesh.size(DATA) == 1:
            return
        trainable = [p for p in self.residence.parameters() if p.requires_grad and not is_sharded(p)]
        if self._replica is None or [*map(id, self._replica.parameters)] != [*map(id, trainable)]:
            overlap = self.placement.num_stages == 1 and self.sharding is None
            given = overlap, self.settings.reduce_dtype
            self._replica = Replica(trainable, self.mesh.group(DATA), *given) if trainable else None

    def split(self, batch: Any, training: bool) -> list[Any]:
        """The micro-batches of a local batch."""
        if training:
            count = self.placement.microbatches(batch_size_of(batch), self.settings.microbatches)
        elif self.settings.evaluation_microbatches == 1:
            count = 1
        else:
            count = self.placement.microbatches(batch_size_of(batch), self.settings.evaluation_microbatches)
        return split_batch(batch, count)

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
            if self._replica is not None:
                self._replica.begin()
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
            if self._replica is not None:
                self._replica.finish()
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
        if self._armable and self._replica is not None:
            self._replica.arm(outputs)

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

    def _communication_device(self) -> torch.device:
        if dist.get_backend() == "gloo":
            return torch.device("cpu")
        return torch.device(self.mesh.device_mesh.device_type, torch.accelerator.current_device_index())


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
