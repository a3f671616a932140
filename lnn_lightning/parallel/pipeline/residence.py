"""What lives on this rank: dropping the rest, keeping shared tensors equal, collecting the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.checkpoint.pieces import Pieces
from lnn_lightning.parallel.data.sharding import Sharding
from lnn_lightning.parallel.data.shards import local_of, whole_of
from lnn_lightning.parallel.data.unused import Unused
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.install import ExpertSharding
from lnn_lightning.parallel.layout import DATA, EXPERT, EXPERT_DATA, PIPELINE, TENSOR, Mesh
from lnn_lightning.parallel.pipeline.ownership import Ownership
from lnn_lightning.parallel.pipeline.plans import PlanBook
from lnn_lightning.parallel.pipeline.schedules import Placement
from lnn_lightning.parallel.pipeline.slices import slices_of
from lnn_lightning.parallel.reduction import reduction_dtype
from lnn_lightning.parallel.step.materialize import materialize
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors, replace_tensors, stand_in_for
from lnn_lightning.parallel.tensor.axis import reduced_shape
from lnn_lightning.parallel.tensor.install import TensorSharding


class Residence:
    """The part of a module that this rank holds.

    Args:
        root: the module.
        ownership: stages of every tensor and unit.
        placement: ranks of the stages.
        mesh: this process's place.
        book: told apart from use by mistake, tracing may run units that are not here.
    """

    def __init__(self, root: nn.Module, ownership: Ownership, placement: Placement, mesh: Mesh, book: PlanBook) -> None:
        self.root, self.ownership, self.placement, self.mesh, self._book = root, ownership, placement, mesh, book
        self._rank = mesh.rank(PIPELINE)
        self.tensor: TensorSharding | None = None
        self.expert: ExpertSharding | None = None
        self.dealt = False
        """Whether the optimizers of data ranks hold different parameters, or pieces of them."""
        self._guards: list[Any] = []
        self.sharding: Sharding | None = None
        self._copied: dict[int, Tensor] = {}
        self._ranks = {
            name: tuple(sorted({placement.rank_of(stage) for stage in stages}))
            for name, stages in ownership.tensors.items()
        }

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Places along the pipeline that hold a parameter or buffer, in order."""
        return self._ranks[name]

    def lives_here(self, name: str) -> bool:
        """Whether this rank holds a parameter or buffer."""
        return self._rank in self.ranks_of(name) and (self.expert is None or self.expert.lives_here(name))

    def is_expert(self, name: str) -> bool:
        """Whether a parameter or buffer belongs to experts that are spread over ranks."""
        return name in self._experts

    def shard_group_of(self, name: str) -> dist.ProcessGroup:
        """Ranks over which ZeRO shards or deals out a parameter."""
        return self.group_of(name) if self.is_expert(name) else self.mesh.shard_group

    def group_of(self, name: str) -> dist.ProcessGroup:
        """Ranks of this stage that hold the same (part of a) parameter or buffer and see other data."""
        if self.is_expert(name) and self.mesh.experts is not None:
            return self.mesh.experts.get_group(EXPERT_DATA)
        return self.mesh.group(DATA)

    def settle(self, seed: int | None, unset: set[str] | None = None) -> None:
        """Drops what lives elsewhere and makes deferred tensors real (given a seed; see :func:`materialize`)."""
        replace_tensors(self.root, lambda name, t: t if self.lives_here(name) or is_stand_in(t) else stand_in_for(t))
        if seed is not None:
            materialize(self.root, self.lives_here, seed, unset)
        for name in self._book.groups:
            module = self.root.get_submodule(name)
            if any(is_stand_in(t) for t in [*module._parameters.values(), *module._buffers.values()]):
                self._guards.append(module.register_forward_pre_hook(self._guard(name)))

    def make_equal(self) -> None:
        """Copies of a tensor start from those of the first data and tensor rank and the first stage that has it.

        Collective over all ranks.
        """
        self.mesh.pipeline_subgroups(self.ranks_of(name) for name, _ in named_tensors(self.root))
        data_group = self.mesh.group(DATA)
        device = self.mesh.device_mesh.device_type
        for name, tensor in named_tensors(self.root):
            if not self.lives_here(name) or tensor.is_meta:
                continue
            value = tensor.detach().to(device).contiguous()
            ranks = self.ranks_of(name)
            if len(ranks) > 1:
                group = self.mesh.pipeline_subgroup(ranks)
                dist.broadcast(value, group=group, group_src=0)
            if self.mesh.size(DATA) > 1:
                dist.broadcast(value, group=data_group, group_src=0)
            if self.mesh.size(TENSOR) > 1:
                dist.broadcast(value, group=self.mesh.group(TENSOR), group_src=0)
            tensor.detach().copy_(value)

    def _guard(self, name: str) -> Callable[..., None]:
        stages = sorted({s for n, t in named_tensors(self.root.get_submodule(name)) for s in self._stages(name, n)})

        def refuse(module: nn.Module, args: Any) -> None:
            if not self._book.tracing:
                raise StepError(
                    f"{name!r} ({type(module).__name__}) is not on this process: it lives on pipeline stage "
                    f"{', '.join(map(str, stages))} and this is pipeline rank {self._rank}. Use it through the "
                    f"Trainer, or load `strategy.full_state_dict()` into a module of your own."
                )

        return refuse

    def _stages(self, module: str, tensor: str) -> frozenset[int]:
        return self.ownership.tensors.get(f"{module}.{tensor}", frozenset())

    def parameters(self, stage: int | None = None) -> list[nn.Parameter]:
        """Parameters on this rank, or those of one of its stages, each once and in the user's order."""
        return [
            parameter
            for name, parameter in self.root.named_parameters()
            if self.lives_here(name) and (stage is None or stage in self.ownership.tensors[name])
        ]

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one that counts a parameter, where several hold it."""
        if not hasattr(self, "_counted"):
            self._counted = {key for key, name in self.names_by_id().items() if self._counts(name)}
        return id(parameter) in self._counted

    def _counts(self, name: str) -> bool:
        if self.ranks_of(name)[0] != self._rank:
            return False
        mesh = self.mesh
        if self.is_expert(name) and mesh.experts is not None:
            data, _, tensor = mesh.experts.get_coordinate() or (0, 0, 0)
            return (data == 0 or self.dealt) and (tensor == 0 or self._has_own_part(name))
        if mesh.rank(TENSOR) > 0 and not self.is_divided(name):
            return False
        # with experts on them the data ranks are asked too, of whom each has the rest, or a share if that is dealt out
        return mesh.experts is None or (mesh.replica_rank if self.dealt else mesh.rank(DATA)) == 0

    def _has_own_part(self, name: str) -> bool:
        """Whether each tensor rank has a part of its own."""
        return any(group is self.mesh.group(TENSOR) for group, _ in self.cuts(name))

    def cuts(self, name: str) -> list[tuple[dist.ProcessGroup, int]]:
        """Process groups whose ranks divide a parameter, with the dimension that each divides."""
        divider, tensor = self._divider(name), self.mesh.group(TENSOR)
        dims = [dim for dim, _ in divider.spans(name)] if divider is not None else []
        stacked = self.expert is not None and any(name in seam.parameters for seam in self.expert.seams)
        expert = self.mesh.experts.get_group(EXPERT) if stacked and self.mesh.experts is not None else tensor
        return [(expert if dim == 0 else tensor, dim) for dim in dims]

    def is_divided(self, name: str) -> bool:
        """Whether each tensor or expert rank holds a part of its own of a parameter."""
        return self._divider(name) is not None

    def _divider(self, name: str | None) -> TensorSharding | ExpertSharding | None:
        """What has cut a parameter."""
        return next((each for each in (self.tensor, self.expert) if each and name and each.is_divided(name)), None)

    def settle_gradients(self, reduce_dtype: torch.dtype | None = None) -> None:
        """Makes the gradients of parameters that all tensor ranks hold equal on them."""
        if self.tensor is not None:
            self.tensor.settle_gradients(local_of, reduce_dtype, self._experts)

    @property
    def _experts(self) -> frozenset[str]:
        if self.expert is None or self.mesh.experts is None:  # with one expert rank all ranks hold all of them
            return frozenset()
        return self.expert.names

    def check_replicas(self) -> None:
        """Compares what all tensor ranks hold, bit by bit. Collective over them.

        Raises:
            StepError: a parameter has drifted apart.
        """
        if self.tensor is not None and (names := self.tensor.drifted(local_of, self._experts)):
            raise StepError(
                f"{len(names)} parameter(s) that all tensor ranks hold are no longer equal on them, the first "
                f"{names[0]!r} (seen on rank {dist.get_rank()}). Something changes them on one rank alone: clipping "
                "by the "
                "norm of this rank's gradients (`torch.nn.utils.clip_grad_norm_`; use `self.clip_gradients` or the "
                "Trainer's "
                "`gradient_clip_val`, which know all of them), a random number, or a callback that depends on the rank."
            )

    def optimized_as(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Tells what optimizers hold in place of parameters, or of pieces of them: (parameter, copy)."""
        self._copied = {id(copy): parameter for parameter, copy in copies}
        self.__dict__.pop("_counted", None)

    def copied(self, parameter: Tensor) -> Tensor:
        """What an optimizer's parameter is a copy of; itself, if it is none."""
        return self._copied.get(id(parameter), parameter)

    def names_by_id(self) -> dict[int, str]:
        """``id(parameter)`` -> its first name, for the module's parameters and the pieces that optimizers hold."""
        names = {id(parameter): name for name, parameter in self.root.named_parameters()}
        if self.sharding is not None:
            names |= {id(shard.local): shard.name for shard in self.sharding.shards}
        return names | {copy: names[id(parameter)] for copy, parameter in self._copied.items()}

    def sum_shared_gradients(self, reduce_dtype: torch.dtype | None = None) -> None:
        """Adds up the gradients of parameters that several ranks of the pipeline use."""
        shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in self.root.named_parameters():
            ranks = self.ranks_of(name)
            if len(ranks) > 1 and self.lives_here(name) and parameter.requires_grad:
                shared.setdefault(ranks, []).append(parameter)
        for ranks, parameters in shared.items():
            group = self.mesh.pipeline_subgroup(ranks)
            unused = Unused(parameters, group)
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                summed = parameter.grad.to(reduction_dtype(parameter.dtype, reduce_dtype))
                dist.all_reduce(summed, group=group)
                parameter.grad.copy_(summed)
            unused.drop()

    def synchronize_buffers(self) -> None:
        """Gives all data ranks the buffers of the first, as DistributedDataParallel does before each forward."""
        if self.mesh.size(DATA) == 1:
            return
        for name, buffer in self.root.named_buffers():
            if self.lives_here(name) and buffer.is_floating_point():
                dist.broadcast(buffer, group=self.group_of(name), group_src=0)

    def name_of_key(self) -> dict[str, str]:
        """Key of the module's state dict -> first name of the tensor it stands for."""
        first = {id(tensor): name for name, tensor in named_tensors(self.root)}
        return {key: first[id(tensor)] for key, tensor in _tensors_by_all_names(self.root)}

    def own_keys(self) -> list[str]:
        """Keys of the module's state dict that this rank is responsible for."""
        first = {id(t): name for name, t in named_tensors(self.root)}
        tensors = {key: t for key, t in _tensors_by_all_names(self.root)}
        keys = []
        for key in self.root.state_dict():
            tensor = tensors.get(key)
            name = first.get(id(tensor)) if tensor is not None else None
            if name is None or self.lives_here(name):
                keys.append(key)
        return keys

    def writes(self, name: str | None) -> bool:
        """Whether this rank may write a tensor to a checkpoint. Buffers differ between ranks: one of them counts."""
        owner, _, attribute = (name or "").rpartition(".")
        if name is None or attribute not in self.root.get_submodule(owner)._buffers:
            return True
        return dist.get_rank(self.group_of(name)) == 0 and self.ranks_of(name)[-1] == self._rank

    def whole(self, name: str | None, value: Tensor) -> Tensor:
        """The whole of a parameter, or of optimizer state of its shape. Collective over the ranks that divide it."""
        if name is not None and self.expert is not None and name in self.expert.names:
            return self.expert.whole(name, value)
        return value if self.tensor is None or name is None else self.tensor.whole(name, value)

    def local(self, name: str | None, value: Tensor, reduced: Sequence[int] = ()) -> Tensor:
        """This rank's part of a whole parameter, or of an optimizer's state of its shape but for reduced dimensions."""
        divider = self._divider(name)
        return value if divider is None or name is None else divider.local(name, value, reduced)

    def whole_shape(self, name: str | None, value: Tensor) -> tuple[int, ...]:
        """Shape of the whole of a tensor of the module."""
        divider = self._divider(name)
        return tuple(value.shape) if divider is None or name is None else tuple(divider.whole_shape(name))

    def pieces(self, name: str | None, value: Tensor, reduced: Sequence[int] = ()) -> Pieces:
        """The slices that this rank holds of a tensor of the module, or of optimizer state of its shape.

        Args:
            name: first name of the parameter or buffer.
            value: as the module has it; the slices share its memory.
            reduced: dimensions of the parameter along which the state is a statistic, of one element.
        """
        held, divider = tuple(value.shape), self._divider(name)
        if divider is None or name is None or held != reduced_shape(divider.local_shape(name), reduced):
            return slices_of(value, held)
        spans = [(dim, runs) for dim, runs in divider.spans(name) if dim not in reduced]
        return slices_of(value, reduced_shape(self.whole_shape(name, value), reduced), spans)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole state dict on every rank, on the CPU. Collective over the pipeline's ranks."""
        group = self.mesh.group(PIPELINE)
        parameters = {name for name, _ in self.root.named_parameters()}
        first = {id(t): name for name, t in named_tensors(self.root)}
        tensors = dict(_tensors_by_all_names(self.root))
        device = self.mesh.device_mesh.device_type
        full: dict[str, Tensor] = {}
        for key, value in self.root.state_dict().items():
            if not isinstance(value, Tensor):
                full[key] = value
                continue
            name = first.get(id(tensors.get(key)))
            ranks = self.ranks_of(name) if name is not None else (0,)
            source = ranks[-1] if name is not None and name not in parameters else ranks[0]
            if source == self._rank:
                here = not is_stand_in(value)
                held = whole_of(value, device) if here else torch.empty(value.shape, dtype=value.dtype, device=device)
                whole = self.whole(name, held).to(device).contiguous()
            else:
                whole = torch.empty(self.whole_shape(name, value), dtype=value.dtype, device=device)
            dist.broadcast(whole, group=group, group_src=source)
            full[key] = whole.cpu().clone()
        return full


def _tensors_by_all_names(root: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
