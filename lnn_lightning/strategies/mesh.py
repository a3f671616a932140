"""Lightning's view of a mesh of processes: launching, ranks, samplers, reductions."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.distributed import group as _world
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lnn_lightning.parallel.connect import connect
from lnn_lightning.parallel.errors import LostRankError
from lnn_lightning.parallel.hosts import hosts_of, split_group_warning
from lnn_lightning.parallel.interface import choose_gloo_interface
from lnn_lightning.parallel.layout import DATA, PIPELINE, Mesh, resolve_layout
from lnn_lightning.parallel.shared_folder import check_same_found
from lnn_lightning.parallel.watch import Watch, while_doing
from lnn_lightning.strategies.faults import SHARE_OF_TIMEOUT, WatchedLauncher, watch_ranks
from lnn_lightning.strategies.slurm import check_tasks, note_tasks_per_node


class MeshStrategy(ParallelStrategy):
    """Processes on a mesh of pipeline, data and tensor ranks, without saying what they compute.

    Args:
        pipeline_parallel_size: pipeline ranks.
        data_parallel_size: data ranks; ``"auto"``: what the other axes leave; a pair: replicate x shard.
        tensor_parallel_size: tensor ranks.
        expert_parallel_size: ranks among data and tensor ranks that share out experts.
        divides_experts: tensor ranks divide each expert.
        process_group_backend: backend of ``torch.distributed``; None: nccl on CUDA, gloo on CPU.
        timeout: how long a collective may take before the job ends with an error.
        parallel_strategy_arguments: passed on to Lightning's ``ParallelStrategy``.
    """

    def __init__(
        self,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int | tuple[int, int] | str = "auto",
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        divides_experts: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **parallel_strategy_arguments: Any,
    ) -> None:
        super().__init__(**parallel_strategy_arguments)
        note_tasks_per_node()
        self._sizes: dict[str, Any] = {
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "expert_parallel_size": expert_parallel_size,
            "divides_experts": divides_experts,
        }
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._num_nodes = 1
        self._mesh: Mesh | None = None
        self._watch: Watch | None = None
        self._sync_gradients = True

    @property
    def mesh(self) -> Mesh:
        """This process's place among all; exists once the Trainer has set up the environment."""
        if self._mesh is None:
            raise RuntimeError(
                "The mesh does not exist yet: it is made when the Trainer starts (fit, validate, test or predict)."
            )
        return self._mesh

    @property
    def watch(self) -> Watch:
        """Looks after the other ranks; exists once the Trainer has set up the environment (docs/faults.md)."""
        assert self._watch is not None
        return self._watch

    @property
    def watch_or_none(self) -> Watch | None:
        """As :attr:`watch`, at any time."""
        return self._watch

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch knows it, with named axes; the LightningModule has it as ``self.device_mesh``."""
        return self.mesh.device_mesh

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data this process sees."""
        return self.mesh.rank(DATA)

    @property
    def data_parallel_size(self) -> int:
        """How many parts the data is divided into."""
        return self.mesh.size(DATA)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Place along the pipeline."""
        return self.mesh.rank(PIPELINE)

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should hand each data rank its own samples (it asks strategies it does not know)."""
        return True

    @property
    def num_nodes(self) -> int:
        """Number of machines; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_tasks(self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = WatchedLauncher(self, self.num_processes)

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's rank-zero helpers who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010 - a function's attribute
        setattr(fabric_rank_zero_only, "rank", self.global_rank)  # noqa: B010

    @override
    def setup_environment(self) -> None:
        if isinstance(self._layer_sync, LayerSync):
            raise NotImplementedError(
                "`Trainer(sync_batchnorm=True)` is not supported: under micro-batches BatchNorm sees one micro-batch "
                "at a time. Leave it out."
            )
        super().setup_environment()
        self.set_world_ranks()
        layout = resolve_layout(self.world_size, **self._sizes)
        self._connect()
        if self._mesh is None:
            self._mesh = Mesh.create(layout, self.root_device.type)
            warning = split_group_warning(hosts_of(None), layout.tensor_parallel_size)
            if warning is not None:
                rank_zero_warn(warning)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh.device_mesh
        self._begin_watch()
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            check_same_found(partial(self._last_checkpoints, trainer))

    def _connect(self) -> None:
        """Makes the process group of all processes, unless an earlier Trainer or the user's code has."""
        if dist.is_initialized():
            return
        environment = self.cluster_environment
        assert environment is not None
        rank = environment.global_rank()
        store, everyone = connect(
            environment.main_address,
            environment.main_port,
            rank,
            environment.world_size(),
            self._timeout or default_pg_timeout,
        )
        choose_gloo_interface(everyone, rank)
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        device = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(environment, backend, timeout=self._timeout, device_id=device, store=store)

    def _last_checkpoints(self, trainer: pl.Trainer) -> list[str]:
        """What ``ckpt_path="last"`` and a requeued SLURM job find on this host."""
        found: set[str] = set()
        for callback in trainer.checkpoint_callbacks:
            # a folder that the logger names is new in every run and has none
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                found |= callback._find_last_checkpoints(trainer)
        if isinstance(self.cluster_environment, SLURMEnvironment):
            requeued = trainer._checkpoint_connector._hpc_resume_path
            found |= {requeued} if requeued is not None else set()
        return sorted(found)

    def _begin_watch(self) -> None:
        """From here on every rank is needed (docs/faults.md)."""
        self._watch = watch_ranks(self)
        self._watch.begin_run(self._timeout.total_seconds() * SHARE_OF_TIMEOUT if self._timeout is not None else None)
        if (loss := self._watch.loss()) is not None:
            raise LostRankError(f"{loss.text} This rank cannot begin without it.")

    @override
    def teardown(self) -> None:
        failing = sys.exc_info()[0] is not None
        super().teardown()
        if failing and self._watch is not None:
            self._watch.end_run(completed=False)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the data ranks (a pipeline's ranks hold the same values). Half precision is summed in fp32."""
        if not isinstance(tensor, Tensor):
            return tensor
        narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        reduced = _sync_ddp_if_available(
            tensor.float() if narrow else tensor, group or self.mesh.group(DATA), reduce_op=reduce_op
        )
        return reduced.to(tensor.dtype) if narrow else reduced

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag)
        return bool(flag == self.world_size) if all else bool(flag)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over the data ranks."""
        return _all_gather_ddp_if_available(tensor, group=group or self.mesh.group(DATA), sync_grads=sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        with while_doing("barrier %s", name):
            if dist.get_backend() == "nccl":
                dist.barrier(device_ids=[self.root_device.index])
            else:
                dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=_world.WORLD)
        return box[0]

    @override
    def block_backward_sync(self) -> Any:
        return _Unsynchronised(self)


class _Unsynchronised:
    """Steps inside do not reduce their gradients: more of the accumulation window follows."""

    def __init__(self, strategy: MeshStrategy) -> None:
        self._strategy = strategy

    def __enter__(self) -> None:
        self._strategy._sync_gradients = False

    def __exit__(self, *exception: Any) -> None:
        self._strategy._sync_gradients = True
