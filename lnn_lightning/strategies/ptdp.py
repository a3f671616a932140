"""PTD-P: pipeline, tensor and data parallelism of an ordinary LightningModule."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lnn_lightning.communication import Compression, LocalSGD
from lnn_lightning.memory.gist import Gist
from lnn_lightning.memory.offload.settings import Offload
from lnn_lightning.memory.recompute import Recompute, check_recompute
from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.data.shards import is_sharded
from lnn_lightning.parallel.errors import LayoutError, StepError
from lnn_lightning.parallel.exchange import all_or_none
from lnn_lightning.parallel.expert.install import is_spread
from lnn_lightning.parallel.expert.settings import ExpertParallel
from lnn_lightning.parallel.expert.upcycle import upcycle
from lnn_lightning.parallel.layout import DATA, PIPELINE, TENSOR, Layout, data_axis
from lnn_lightning.parallel.pipeline.engine import PipelineEngine, PipelineSettings
from lnn_lightning.parallel.pipeline.schedules import place
from lnn_lightning.parallel.pipeline.table import layout_table
from lnn_lightning.parallel.step.batch import batch_size_of
from lnn_lightning.parallel.step.standin import convert_module, has_stand_ins
from lnn_lightning.parallel.tensor.install import is_divided
from lnn_lightning.parallel.tensor.table import tensor_table
from lnn_lightning.parallel.watch import doing
from lnn_lightning.precision import MeshAgreement, mesh_precision, reduce_dtype_of
from lnn_lightning.strategies.averaging import divide_averages, upcycle_averages
from lnn_lightning.strategies.compression import CompressionHooks
from lnn_lightning.strategies.data import DataHooks
from lnn_lightning.strategies.effects import set_metric_group
from lnn_lightning.strategies.experts import ExpertHooks
from lnn_lightning.strategies.initial_weights import read_initial_weights
from lnn_lightning.strategies.local_steps import refuse_local_steps
from lnn_lightning.strategies.manual import computing_step
from lnn_lightning.strategies.moving import gradients_looked_at
from lnn_lightning.strategies.peek import peek_batch
from lnn_lightning.strategies.scaling import scale_blocks
from lnn_lightning.strategies.signals import AgreedSignals
from lnn_lightning.strategies.steps import LightningObserver, StepDriver

log = logging.getLogger(__name__)

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


_LOSS_FORM = {
    "other": "The loss of a batch is neither the mean nor the sum of the losses of its parts (a contrastive loss, or "
    "a mean over a part of the targets only). With micro-batches and data ranks it is the mean over them, as under "
    "gradient accumulation. For the loss of the whole local batch set `microbatches=1`.",
    "unknown": "It could not be found out whether the loss is a mean or a sum over samples; it is taken for a mean. "
    "If it is a sum, set `microbatches=1` or divide it by the number of samples.",
}


class PTDPStrategy(CompressionHooks, ExpertHooks, DataHooks):
    """Trains an unmodified LightningModule on a mesh of pipeline and data ranks.

    The module's ``training_step`` is traced once; its blocks are cut into stages, and from then on every rank runs the
    same ``training_step``, micro-batch by micro-batch, with the blocks that live elsewhere answered by values received
    from there (docs/architecture.md). PTD-P: Narayanan et al. 2021, arXiv 2104.04473.

    Args:
        data_parallel_size: ranks that see different data; ``"auto"``: what the other axes leave. A pair
            ``(replicate, shard)``: that many groups of so many ranks, each group holding the state that ``zero_stage``
            shards once (hybrid sharding: gathers stay within a group).
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: ranks that the blocks are spread over.
        schedule: order of forwards and backwards: ``naive`` (one micro-batch), ``gpipe``, ``1f1b``, ``interleaved``,
            ``zero_bubble`` or ``zbv``.
        microbatches: parts a local batch is cut into. A batch it does not divide uses the largest divisor below it.
            ``"auto"``: four a pipeline rank, one without a pipeline.
        stages_per_rank: more than one: stages go round the ranks (interleaved).
        split_points: names of the sub-modules that begin the second, third, ... stage; None: found by the trace and
            balanced.
        tensor_parallel_plan: ``"auto"``: found by itself; or a glob of layer names -> ``colwise``, ``rowwise`` or
            ``replicate`` for the layers whose role is not to be found.
        sequence_parallel: keep values between blocks divided along their tokens over the tensor ranks.
        check_replicas: compare bit by bit what all tensor ranks hold after every optimizer step (otherwise after the
            first two and every hundredth), and stop with an error if it has drifted apart.
        zero_stage: what data ranks share out instead of each holding it: 0: nothing; 1: optimizer state; 2: gradients
            too; 3: parameters too (Rajbhandari et al. 2020, arXiv 1910.02054).
        reshard_between_microbatches: (``zero_stage=3``) free whole parameters behind the forward of every micro-batch;
            otherwise a step of several micro-batches gathers them once.
        offload: training state in host memory or in files (docs/memory.md); None: where it is computed with.
        recompute: compute again in backward what the blocks would keep for it, with the same numbers: ``"full"``: every
            block; n: the first of every n blocks of a stage; ``"selective"``: the core of attention alone (Korthikanti
            et al. 2022, arXiv 2205.05198); ``"auto"``: as many checkpoints a stage as hold the least memory.
        expert: :class:`lnn_lightning.ExpertParallel`: experts are shared out over ranks, and tokens sent to them; with
            ``upcycle`` feed-forwards of a dense model become experts first (docs/experts.md).
        activation_compression: :class:`lnn_lightning.Gist`: keep activations in fewer bytes between forward and
            backward.
        gradient_compression: gradients in fewer bytes between data ranks: ``PowerSGD``, ``TopK``, ... of
            :mod:`lnn_lightning.communication` (docs/compression.md); None: they are averaged exactly.
        evaluation_microbatches: the same as ``microbatches`` for validation, test and prediction. One gives exactly the
            results of one process.
        async_save: let training go on while a checkpoint is written, from a copy in host memory. The next save and the
            end of training wait for it and raise its error.
        example_batch: a batch to trace with, if the dataloader cannot be peeked at.
        initial_weights: the module's first values: a ``.safetensors`` file or a folder of them as the Hugging Face hub
            has it, a Lightning ``.ckpt``, or a checkpoint of this strategy (docs/checkpoints.md). Each rank reads what
            it holds. ``ckpt_path`` comes later and wins.
        process_group_backend: backend of ``torch.distributed``; None: nccl on CUDA, gloo on CPU.
        timeout: how long a collective may take before the job ends with an error.
        parallel_strategy_arguments: passed on to Lightning's ``ParallelStrategy``.

    Raises:
        LayoutError: settings that do not fit each other or the number of processes.
        StepError: (in fit, validate, ...) the step cannot be followed or cut.
    """

    def __init__(
        self,
        data_parallel_size: int | tuple[int, int] | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        schedule: str = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages_per_rank: int = 1,
        split_points: list[str] | None = None,
        tensor_parallel_plan: dict[str, str] | Literal["auto"] = "auto",
        sequence_parallel: bool = False,
        check_replicas: bool = False,
        zero_stage: int = 0,
        reshard_between_microbatches: bool = False,
        recompute: Recompute = None,
        activation_compression: Gist | None = None,
        offload: Offload | None = None,
        gradient_compression: Compression | None = None,
        expert: ExpertParallel | None = None,
        evaluation_microbatches: int = 1,
        async_save: bool = False,
        example_batch: Any = None,
        initial_weights: str | Path | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **parallel_strategy_arguments: Any,
    ) -> None:
        if expert is not None and not isinstance(expert, ExpertParallel):
            raise LayoutError(f"`expert` must be None or ExpertParallel(...), got {expert!r}.")
        super().__init__(
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel_size=expert.size if expert is not None else 1,
            divides_experts=expert is not None and expert.divide_experts,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **parallel_strategy_arguments,
        )
        data_size, replicas = data_axis(data_parallel_size)
        experts = (expert.size, expert.divide_experts) if expert is not None and data_size != "auto" else ()
        Layout(
            *(pipeline_parallel_size, 1 if data_size == "auto" else data_size, tensor_parallel_size, replicas, *experts)
        )
        self._zero = ZeroSettings(zero_stage, reshard_between_microbatches)
        if not isinstance(data_parallel_size, (int, str)) and zero_stage == 0:
            raise LayoutError(
                f"`data_parallel_size={data_parallel_size!r}` (replicate, shard) shards nothing with `zero_stage=0`: "
                f"set `zero_stage`, or `data_parallel_size={data_size}`."
            )
        if tensor_parallel_plan != "auto" and not isinstance(tensor_parallel_plan, dict):
            raise LayoutError(
                "`tensor_parallel_plan` must be 'auto' or a dict of globs and roles such as {'*.q_proj': 'colwise'}, "
                "got "
                f"{tensor_parallel_plan!r}."
            )
        for name, count in (("microbatches", microbatches), ("evaluation_microbatches", evaluation_microbatches)):
            if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise LayoutError(f"`{name}` must be 'auto' or a whole number of at least 1, got {count!r}.")
        self._settings = PipelineSettings(
            place(schedule, pipeline_parallel_size, stages_per_rank),
            microbatches,
            evaluation_microbatches,
            split_points,
            sequence_parallel,
            None if tensor_parallel_plan == "auto" else tensor_parallel_plan,
            expert=expert,
        )
        if activation_compression is not None and not isinstance(activation_compression, Gist):
            raise LayoutError(f"`activation_compression` must be None or Gist(...), got {activation_compression!r}.")
        if gradient_compression is not None and not isinstance(gradient_compression, Compression):
            raise LayoutError(
                f"`gradient_compression` must be None or one of `lnn_lightning.communication`, such as "
                f"PowerSGD(rank=4), got {gradient_compression!r}."
            )
        if isinstance(gradient_compression, LocalSGD):
            refuse_local_steps(zero_stage, expert is not None, offload is not None)
        self._gradient_compression = gradient_compression
        check_recompute(recompute)
        self._recompute = recompute
        self._activation_compression = activation_compression
        self._offload = offload
        self._check_replicas = check_replicas
        self._async_save = async_save
        self._example_batch = example_batch
        self._initial_weights = initial_weights
        self._group_names: list[list[list[str]]] = []

    # ---------------------------------------------------------------- setup

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        doing("setting up")
        self.accelerator.setup(trainer)
        if not isinstance(trainer._signal_connector, AgreedSignals):
            trainer._signal_connector = AgreedSignals(trainer, self)
        self.prepare_checkpoints()
        if trainer.state.fn == TrainerFn.FITTING:
            self.refuse_hyperparameters(trainer)
            self._bring_back(trainer)
        module = self.lightning_module
        batch = None
        if new := self._engine is None or self._engine.root is not module:
            batch = self._prepare(trainer, module)
        if trainer.state.fn == TrainerFn.FITTING and self.engine.loss_form is None:
            self._find_loss_form(batch if batch is not None else self._first_batch(trainer))
        convert_module(module, device=self.root_device)
        self.setup_compression()
        self.engine.shard(self._zero)
        self.setup_memory(trainer)
        self.setup_experts()
        if trainer.state.fn == TrainerFn.FITTING:
            scale_blocks(self.engine, self.precision_plugin, self.root_device)
        if new and self._initial_weights is not None:
            self._read_initial_weights(self._initial_weights, module)
        divide_averages(trainer, module)
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self.engine.setup_training()
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
            self.offload_optimizers(trainer)

    def _prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> Any:
        """Makes the engine, cuts the module, and returns the batch it was traced with."""
        in_pieces = any(is_sharded(parameter) for parameter in module.parameters())
        if has_stand_ins(module) or in_pieces or is_divided(module) or is_spread(module):
            raise StepError(
                f"This {type(module).__name__} was already divided by another strategy. Use the Trainer that did, or "
                "load `strategy.full_state_dict()` into a new one."
            )
        seed = self.broadcast(torch.initial_seed() % 2**62)
        if (expert := self._settings.expert) is not None and expert.upcycle is not None:
            upcycle(module, expert.upcycle, seed)
            upcycle_averages(trainer, expert.upcycle, seed)
        agreement = MeshAgreement(
            self._differing_groups(),
            lambda parameter: self.engine.residence.counts_here(parameter),
            self.root_device,
            gradients_looked_at(self._offload),
            (self.mesh.group(DATA),) if isinstance(self._gradient_compression, LocalSGD) else (),
        )
        self.precision_plugin = mesh_precision(self.precision_plugin, agreement)
        self.precision_plugin.convert_module(module)
        set_metric_group(module, self.mesh.group(DATA))
        batch = self._first_batch(trainer)
        observer = LightningObserver(module)
        settings = replace(self._settings, reduce_dtype=reduce_dtype_of(self.precision_plugin))
        self._engine = PipelineEngine(module, settings, self.mesh, observer, seed)
        kind = _STEPS[trainer.state.fn]  # type: ignore[index]
        doing("tracing %s and dividing the module", kind)
        self._engine.unset = set() if self._initial_weights is not None else None
        plan = self._engine.prepare(kind, self._example_step(kind), batch, trainer.state.fn == TrainerFn.FITTING)
        self._driver = StepDriver(module, self._engine, observer, self.mesh, self.root_device)
        training = trainer.state.fn == TrainerFn.FITTING
        parts = len(self._engine.split(batch, training))
        table = layout_table(plan, self._engine.residence, self._settings.placement, batch_size_of(batch), parts)
        rank_zero_info(table)
        if (tensor := self._engine.residence.tensor) is not None:
            rank_zero_info(tensor_table(module, tensor.plan))
        return batch

    def _differing_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups along the axes on which optimizers hold different parameters."""
        groups = [self.mesh.group(axis) for axis in (PIPELINE, TENSOR)]
        if self.mesh.experts is not None:
            groups.append(self.mesh.group(DATA))
        elif self._zero.stage > 0:
            groups.append(self.mesh.shard_group)
        return tuple(groups)

    def _read_initial_weights(self, path: str | Path, module: pl.LightningModule) -> None:
        def read() -> None:
            read_initial_weights(path, module, self.engine.residence, self.engine.unset or ())

        all_or_none(read, dist.group.WORLD, self.root_device)

    def _first_batch(self, trainer: pl.Trainer) -> Any:
        """One batch of the loop that starts. Collective: a rank without one stops all."""
        return all_or_none(
            lambda: self.precision_plugin.convert_input(self.own_first_batch(trainer)),
            dist.group.WORLD,
            self.root_device,
        )

    def own_first_batch(self, trainer: pl.Trainer) -> Any:
        """One batch of the loop that starts, as the dataloader of this rank gives it.

        Raises:
            StepError: it gives none.
        """
        batch = self._example_batch if self._example_batch is not None else peek_batch(trainer)
        if batch is None:
            raise StepError("There is no batch to trace the step with: the dataloader is empty. Pass `example_batch=`.")
        return batch

    def _example_step(self, kind: str) -> Any:
        assert self.lightning_module is not None
        step = self._user_step(kind, self._example_arguments(kind))
        if kind != "training_step" or self.lightning_module.automatic_optimization:
            return step
        return computing_step(self.lightning_module, step)

    def _find_loss_form(self, batch: Any) -> None:
        self.engine.find_loss_form(self._example_step("training_step"), batch)
        if (warning := _LOSS_FORM.get(self.engine.loss_form or "")) is not None:
            rank_zero_warn(warning)

    # ---------------------------------------------------------------- the module as a whole

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole module's state dict on every rank, on the CPU. Collective: call it on all ranks."""
        self.settle_updates()
        return self.engine.residence.full_state_dict()

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        convert_module(self.lightning_module, device=self.root_device)

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        return torch.device("meta") if empty_init else super().tensor_init_context(empty_init)

    @override
    def teardown(self) -> None:
        if self._engine is not None and self._engine.root is self.lightning_module:
            convert_module(self._engine.root, device=torch.device("cpu"))
        super().teardown()
