"""Experts spread over ranks: found before the step is traced, shared out behind the division of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.find import Seam
from lnn_lightning.parallel.expert.hosts import host_groups
from lnn_lightning.parallel.expert.install import ExpertSharding, prepare_seams
from lnn_lightning.parallel.expert.layer import moe_layers
from lnn_lightning.parallel.expert.settings import ExpertParallel
from lnn_lightning.parallel.hosts import hosts_of
from lnn_lightning.parallel.layout import DATA, EXPERT, EXPERT_DATA, TENSOR, Layout, Mesh
from lnn_lightning.parallel.tensor.axis import TensorAxis


def find_experts(root: nn.Module, layout: Layout, settings: ExpertParallel | None) -> list[Seam]:
    """The blocks of a module whose experts are to be shared out; none if that is not asked for.

    Raises:
        StepError: there are none, or one has fewer experts than there are ranks to share them out.
    """
    capacity = settings.capacity_factor if settings is not None else None
    if not layout.spreads_experts and capacity is None and (settings is None or settings.upcycle is None):
        if layout.tensor_parallel_size > 1:  # so that the layers around experts can be divided
            prepare_seams(root, loops=False)
        return []
    seams = prepare_seams(root)
    size = layout.expert_parallel_size
    if not seams and (layout.spreads_experts or capacity is not None):
        asked = f"`expert_parallel_size={size}`" if size > 1 else f"`capacity_factor={capacity}`"
        raise StepError(
            f"{asked} found no experts in {type(root).__name__}: neither a module with stacked weights [experts, ...] "
            "that is called with tokens, their experts and the weights of these, nor one that calls the members of a "
            "ModuleList or ModuleDict of equal modules on the tokens that a router chose for each. Leave it out, or "
            "make experts of a dense model: `upcycle={'blocks': '*.mlp', 'experts': 8}`."
        )
    if capacity is not None and not any(seam.kind == "fused" for seam in seams):
        raise StepError(
            f"`capacity_factor={capacity}` is for experts that are one module with stacked weights. {seams[0].name!r} "
            "has experts that are modules of their own, and its code decides which tokens they get. Leave it out, or "
            "give `upcycle` a `capacity_factor`."
        )
    for seam in seams:
        if seam.experts < size:
            raise StepError(
                f"{seam.name!r} has {seam.experts} experts, too few for {size} expert ranks. `expert_parallel_size` "
                f"must be at most {min(each.experts for each in seams)}."
            )
        vars(root.get_submodule(seam.name))["is_one_unit"] = True
    return seams


def keeps_pace(root: nn.Module, mesh: Mesh) -> bool:
    """Whether all data ranks must run their blocks equally often: they send tokens, or add up how these were routed."""
    if mesh.size(DATA) == 1:
        return False
    return mesh.experts is not None or bool(moe_layers(root))


def spread_experts(
    root: nn.Module, seams: Sequence[Seam], mesh: Mesh, settings: ExpertParallel | None, device: torch.device
) -> ExpertSharding:
    """Shares out the experts of the blocks that are on this rank. Collective over all ranks.

    Args:
        root: the module; what lives on other stages is gone, layers are divided.
        seams: what :func:`find_experts` found.
        mesh: this process's place.
        settings: as the user gave them.
        device: where ranks communicate.
    """
    axis = make_axis(mesh, settings)
    capacity = settings.capacity_factor if settings is not None else None
    sharding = ExpertSharding(root, seams, axis, capacity_factor=capacity, device=device)
    sharding.install()
    return sharding


def make_axis(mesh: Mesh, settings: ExpertParallel | None) -> ExpertAxis:
    """The expert ranks of a mesh as a block sees them. Collective over all ranks."""
    experts, layout = mesh.experts, mesh.layout
    if experts is None:
        return ExpertAxis()
    group = experts.get_group(EXPERT) if layout.expert_parallel_size > 1 else None
    tensor = TensorAxis(mesh.size(TENSOR), mesh.rank(TENSOR), mesh.group(TENSOR)) if mesh.size(TENSOR) > 1 else None
    two_step = settings.two_step if settings is not None else "auto"
    hosts = host_groups(layout, hosts_of(None)) if group is not None and two_step else None
    return ExpertAxis(
        layout.expert_parallel_size,
        experts.get_local_rank(EXPERT),
        group,
        layout.expert_data_size / mesh.size(DATA),
        tensor,
        layout.divides_experts,
        hosts,
        experts.get_group(EXPERT_DATA) if layout.expert_data_size > 1 else None,
    )
