"""What a rank holds as a whole and other ranks too: its gradients are averaged over those that hold the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lnn_lightning.parallel.data.replicate import Replica
from lnn_lightning.parallel.data.shards import is_sharded
from lnn_lightning.parallel.layout import DATA, EXPERT_DATA, Mesh
from lnn_lightning.parallel.reduction import GradientReduction

if TYPE_CHECKING:
    from lnn_lightning.parallel.pipeline.residence import Residence


class Replicas:
    """Experts are averaged over the ranks that hold the same ones, all other parameters over the data ranks.

    Args:
        mesh: this process's place.
        reduce_dtype: in which gradients are added up; None: see :func:`reduction_dtype`.

    Attributes:
        reduction: how gradients are averaged, if not by an all-reduce.
    """

    def __init__(self, mesh: Mesh, reduce_dtype: torch.dtype | None = None) -> None:
        self._mesh, self._reduce_dtype = mesh, reduce_dtype
        self._replicas: dict[str, Replica] = {}
        self.reduction: GradientReduction | None = None

    def adopt(self, residence: Residence, overlap: bool) -> None:
        """Takes the parameters that learn now; they are on their device.

        Args:
            residence: the parameters.
            overlap: reductions may be armed before the last backward.
        """
        learning: dict[str, list[nn.Parameter]] = {DATA: [], EXPERT_DATA: []}
        for name, parameter in residence.root.named_parameters():
            if residence.lives_here(name) and parameter.requires_grad and not is_sharded(parameter):
                learning[EXPERT_DATA if residence.is_expert(name) else DATA].append(parameter)
        for axis, parameters in learning.items():
            group = self._group(axis)
            known = self._replicas.get(axis)
            if known is not None and [*map(id, known.parameters)] == [*map(id, parameters)]:
                continue
            self._replicas.pop(axis, None)
            if parameters and group is not None:
                # which experts get tokens differs between ranks, and so would the order of reductions among exchanges
                armed = overlap and axis == DATA
                names = residence.names_by_id()
                reduction = self.reduction.hook(axis, group, names) if self.reduction is not None else None
                self._replicas[axis] = Replica(parameters, group, armed, self._reduce_dtype, reduction)

    def _group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks of an axis; None: this one alone."""
        if axis == DATA:
            return self._mesh.group(DATA) if self._mesh.size(DATA) > 1 else None
        experts = self._mesh.experts
        return experts.get_group(axis) if experts is not None and self._mesh.layout.expert_data_size > 1 else None

    def begin(self) -> None:
        """Once before the first forward of a step that ends with a reduction."""
        for replica in self._replicas.values():
            replica.begin()

    def arm(self, outputs: Any) -> None:
        """Before the step's last backward: what it adds to is reduced as it gets ready."""
        for axis, replica in self._replicas.items():
            if axis == DATA:
                replica.arm(outputs)

    def finish(self) -> None:
        """Behind the step's last backward; reduces what was not armed."""
        for replica in self._replicas.values():
            replica.finish()
