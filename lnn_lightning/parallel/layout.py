"""The mesh: axis sizes to ranks, and which ranks share what.

Axes from outermost to innermost are ``pipeline_parallel``, ``data_parallel`` and ``tensor_parallel``: tensor ranks are
neighbours on one host, pipeline stages are far apart (PTD-P, Narayanan et al. 2021, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lnn_lightning.parallel.errors import LayoutError

PIPELINE, DATA, TENSOR = AXES = ("pipeline_parallel", "data_parallel", "tensor_parallel")
HYBRID = ("data_replicate", "data_shard")
EXPERT_DATA, EXPERT, EXPERT_TENSOR = "expert_data", "expert_parallel", "expert_tensor"


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; their product is the number of processes.

    ``data_replicas``: the data axis falls into this many groups of neighbours, each of which holds the sharded state
    once (hybrid sharding). ``expert_parallel_size`` folds into the data and tensor axes: so many neighbours among data
    x tensor ranks share out the experts, or so many data ranks with the same place among the tensor ranks, if those
    divide each expert (``divides_experts``).

    Raises:
        LayoutError: a size is not a positive whole number, or the expert ranks do not fit.
    """

    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_replicas: int = 1
    expert_parallel_size: int = 1
    divides_experts: bool = False

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.shape, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"`{axis}_size` must be a whole number of at least 1, got {size!r}.")
        if self.data_parallel_size % self.data_replicas:
            raise LayoutError(
                f"{self.data_parallel_size} data ranks cannot be divided into {self.data_replicas} equal groups."
            )
        ranks = self.data_parallel_size * (1 if self.divides_experts else self.tensor_parallel_size)
        if ranks % self.expert_parallel_size:
            of = "data" if self.divides_experts or self.tensor_parallel_size == 1 else "data x tensor"
            fits = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            raise LayoutError(
                f"`expert_parallel_size={self.expert_parallel_size}` does not divide the {ranks} {of} ranks, which are "
                f"the expert ranks too. Sizes that do: {fits}."
            )

    @property
    def shard_size(self) -> int:
        """Data ranks that share one copy of the sharded state."""
        return self.data_parallel_size // self.data_replicas

    @property
    def expert_tensor_size(self) -> int:
        """Tensor ranks that divide each expert."""
        return self.tensor_parallel_size if self.divides_experts else 1

    @property
    def expert_data_size(self) -> int:
        """Ranks that hold the same (part of an) expert."""
        ranks = self.data_parallel_size * self.tensor_parallel_size
        return ranks // (self.expert_parallel_size * self.expert_tensor_size)

    @property
    def spreads_experts(self) -> bool:
        """Whether no rank has all experts whole."""
        return self.expert_parallel_size > 1 or self.expert_tensor_size > 1

    def expert_place(self, data: int, tensor: int) -> tuple[int, int]:
        """Place among the ranks that hold the same experts, and among those that share them out."""
        place = data if self.divides_experts else data * self.tensor_parallel_size + tensor
        return divmod(place, self.expert_parallel_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes in the order of the axes."""
        return (self.pipeline_parallel_size, self.data_parallel_size, self.tensor_parallel_size)

    @property
    def world_size(self) -> int:
        """Number of processes the layout needs."""
        return self.pipeline_parallel_size * self.data_parallel_size * self.tensor_parallel_size

    def rank_of(self, pipeline: int, data: int, tensor: int) -> int:
        """Global rank at a place in the mesh."""
        _, data_size, tensor_size = self.shape
        return (pipeline * data_size + data) * tensor_size + tensor


def data_axis(data_parallel_size: int | Sequence[int] | Literal["auto"]) -> tuple[int | Literal["auto"], int]:
    """Size of the data axis and number of replicas from ``n``, ``"auto"`` or a pair ``(replicate, shard)``.

    Raises:
        LayoutError: it is none of these.
    """
    if isinstance(data_parallel_size, str) or not isinstance(data_parallel_size, Sequence):
        return data_parallel_size, 1
    pair: Any = tuple(data_parallel_size)
    if len(pair) != 2 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in pair):
        raise LayoutError(
            "`data_parallel_size` must be a whole number, 'auto', or a pair (replicate, shard) of whole numbers of at "
            f"least 1, got {data_parallel_size!r}."
        )
    return pair[0] * pair[1], pair[0]


def resolve_layout(
    world_size: int,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int | Sequence[int] | Literal["auto"] = "auto",
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    divides_experts: bool = False,
) -> Layout:
    """Fills in ``data_parallel_size="auto"`` and checks the sizes against the number of processes.

    Raises:
        LayoutError: the axes do not divide, or do not multiply to, ``world_size``.
    """
    model_parallel = Layout(pipeline_parallel_size, 1, tensor_parallel_size).world_size
    size, replicas = data_axis(data_parallel_size)
    if size == "auto":
        if world_size % model_parallel:
            raise LayoutError(
                f"{world_size} processes cannot be divided into pipeline_parallel_size={pipeline_parallel_size} x "
                f"tensor_parallel_size={tensor_parallel_size}: {world_size} is no multiple of {model_parallel}. "
                f"Start {model_parallel} processes (or a multiple) with `Trainer(devices=..., num_nodes=...)`, or "
                "change the sizes."
            )
        size = world_size // model_parallel
    experts = expert_parallel_size, divides_experts
    layout = Layout(pipeline_parallel_size, size, tensor_parallel_size, replicas, *experts)
    if layout.world_size != world_size:
        raise LayoutError(
            f"pipeline_parallel_size={pipeline_parallel_size} x data_parallel_size={size} x "
            f"tensor_parallel_size={tensor_parallel_size} needs {layout.world_size} processes, but {world_size} run. "
            "Change `Trainer(devices=..., num_nodes=...)`, or leave `data_parallel_size='auto'`."
        )
    return layout


@dataclass
class Mesh:
    """The layout on real processes: this rank's place and the process groups along each axis.

    ``sharding`` is the data axis alone, or for hybrid sharding the two axes replicate x shard it consists of.
    ``experts`` has the axes that expert parallelism folds data and tensor ranks into: ranks that hold the same experts,
    ranks that share them out, ranks that divide each; None: experts are not spread.
    """

    layout: Layout
    device_mesh: DeviceMesh
    sharding: DeviceMesh
    experts: DeviceMesh | None = None
    _shared_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    @classmethod
    def create(cls, layout: Layout, device_type: str) -> Mesh:
        """Builds the device mesh. Collective over all processes; the default process group must exist."""
        mesh = init_device_mesh(device_type, layout.shape, mesh_dim_names=AXES)
        experts = None
        if layout.spreads_experts:
            sizes = layout.expert_data_size, layout.expert_parallel_size, layout.expert_tensor_size
            names = (PIPELINE, EXPERT_DATA, EXPERT, EXPERT_TENSOR)
            folded = init_device_mesh(device_type, (layout.pipeline_parallel_size, *sizes), mesh_dim_names=names)
            experts = folded[names[1:]]
        if layout.data_replicas == 1:
            return cls(layout, mesh, mesh[DATA], experts)
        shape = (
            layout.pipeline_parallel_size,
            layout.data_replicas,
            layout.shard_size,
            layout.tensor_parallel_size,
        )
        hybrid = init_device_mesh(device_type, shape, mesh_dim_names=(PIPELINE, *HYBRID, TENSOR))
        return cls(layout, mesh, hybrid[HYBRID], experts)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Data ranks that share one copy of the sharded state; all data ranks unless sharding is hybrid."""
        return self.sharding.get_group(self.sharding.ndim - 1)

    @property
    def replica_rank(self) -> int:
        """Which copy of the sharded state this process holds a part of; 0 unless sharding is hybrid."""
        return self.sharding.get_local_rank(0) if self.sharding.ndim > 1 else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of the ranks that differ from this one only along ``axis``."""
        return self.device_mesh.get_group(axis)

    def rank(self, axis: str) -> int:
        """This process's place along ``axis``."""
        return self.device_mesh.get_local_rank(axis)

    def size(self, axis: str) -> int:
        """Number of places along ``axis``."""
        return self.layout.shape[AXES.index(axis)]

    def pipeline_subgroups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Makes the groups for parameters that some, not all, stages share.

        Collective over all processes, which must pass the same sets of places along the pipeline axis.
        """
        _, data_size, tensor_size = self.layout.shape
        for ranks in sorted(set(rank_sets)):
            if len(ranks) < 2 or ranks in self._shared_groups:
                continue
            if len(ranks) == self.layout.pipeline_parallel_size:
                self._shared_groups[ranks] = self.group(PIPELINE)
                continue
            for data in range(data_size):
                for tensor in range(tensor_size):
                    members = [self.layout.rank_of(pipeline, data, tensor) for pipeline in ranks]
                    group = dist.new_group(members)
                    if dist.get_rank() in members:
                        self._shared_groups[ranks] = group

    def pipeline_subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Group made before by :meth:`pipeline_subgroups` that this rank is a member of."""
        group = self._shared_groups[ranks]
        assert group is not None
        return group
