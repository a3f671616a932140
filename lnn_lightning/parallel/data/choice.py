"""What ZeRO 2 and 3 shard: which modules, and which of their parameters must stay whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.data.sharding import Sharding
from lnn_lightning.parallel.data.shards import Apart
from lnn_lightning.parallel.pipeline.ownership import Ownership
from lnn_lightning.parallel.step.trace import Trace


def shard_units(
    root: nn.Module,
    names: Sequence[str],
    stages: Sequence[int],
    ownership: Ownership,
    trace: Trace,
    mesh: DeviceMesh,
    settings: ZeroSettings,
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None = None,
    apart: Apart | None = None,
) -> Sharding:
    """Shards the units of this rank's stages over the data ranks. Collective over all processes.

    Args:
        root: the module, its tensors on their device.
        names: all units.
        stages: this rank's stages.
        ownership: stages of units and tensors.
        trace: the traced step.
        mesh: data ranks, or replicate x shard.
        settings: the stage of ZeRO.
        group: all data ranks.
        reduce_dtype: in which gradients are added up; None: see :func:`reduction_dtype`.
        apart: parameters of which other ranks hold the same (experts); None: there are none.
    """
    groups, whole = choose_units(root, names, stages, ownership, trace, apart.sizes if apart is not None else {})
    if apart is not None and apart.mesh.size() == 1:
        whole |= dict.fromkeys(apart.sizes, "no other rank holds the same experts")
    sharding = Sharding(root, groups, whole, mesh, settings, group, reduce_dtype, apart)
    sharding.prefetch(trace)
    return sharding


def choose_units(
    root: nn.Module,
    names: Sequence[str],
    stages: Sequence[int],
    ownership: Ownership,
    trace: Trace,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[int, list[list[str]]], dict[str, str]]:
    """What :func:`shard_units` shards: its first arguments, and elements of parameters of which ranks have parts.

    Returns:
        Stage -> names of the modules to shard, those that are sharded as one together; and names of the parameters that
        stay whole, with the reason.
    """
    parameters = dict(root.named_parameters())
    shared = {name for name, where in ownership.tensors.items() if len(where) > 1 and name in parameters}
    elements = {id(each): sizes.get(name, each.numel()) for name, each in parameters.items()}
    groups = {}
    for stage in stages:
        units = called_pieces(root, [name for name in names if ownership.units[name] == {stage}], trace)
        tied = groups_of(root, units, {id(parameters[name]) for name in shared})
        groups[stage] = merged(root, tied, trace, elements)
    chosen = [group for stage_groups in groups.values() for group in stage_groups]
    return groups, dict.fromkeys(shared, "several stages hold it") | whole_parameters(root, chosen, trace)


def called_pieces(root: nn.Module, names: Sequence[str], trace: Trace) -> list[str]:
    """What to shard as one of these units: the unit, or the pieces of it that are called one by one.

    Args:
        root: the module.
        names: units that live on one stage.
        trace: the traced step; one without calls (it could not be followed) says nothing.
    """
    pieces: dict[str, list[str]] = {name: [] for name in names}
    for call in trace.calls:
        if call.group in pieces and call.unit not in pieces[call.group]:
            pieces[call.group].append(call.unit)
    found: list[str] = []
    for name, called in pieces.items():
        if not called or name in called:
            found.append(name)
            continue
        found += [piece for piece in called if not any(piece.startswith(other + ".") for other in called)]
    return [name for name in found if any(True for _ in root.get_submodule(name).parameters())]


def groups_of(root: nn.Module, units: Sequence[str], apart: set[int]) -> list[list[str]]:
    """Units that share parameters (tied embeddings) are sharded as one, but for those in ``apart`` (by id)."""
    groups: list[tuple[list[str], set[int]]] = []
    for unit in units:
        own = {id(parameter) for parameter in root.get_submodule(unit).parameters()} - apart
        joined = [group for group in groups if group[1] & own]
        names = [name for group in joined for name in group[0]] + [unit]
        groups = [group for group in groups if not group[1] & own]
        groups.append((names, own.union(*(group[1] for group in joined))))
    return [names for names, _ in groups]


def merged(root: nn.Module, groups: list[list[str]], trace: Trace, elements: Mapping[int, int]) -> list[list[str]]:
    """Small units that follow each other in the step (embeddings, a norm and the head) are gathered at once.

    No group becomes larger than the largest was. Only units called once are merged: a group ends with the call of its
    last unit.

    Args:
        root: the module.
        groups: names of the modules to shard, those that share parameters together.
        trace: the traced step.
        elements: of each parameter, by id: the same on all ranks.
    """
    calls = [call.unit for call in trace.calls]
    once = {name for name, count in Counter(calls).items() if count == 1}
    free = {group[0]: group for group in groups if len(group) == 1 and group[0] in once}
    sizes = [sum(elements[id(p)] for unit in group for p in root.get_submodule(unit).parameters()) for group in groups]
    size_of = {group[0]: size for group, size in zip(groups, sizes, strict=True)}
    result = [group for group in groups if group[0] not in free]
    last: list[str] | None = None
    room = 0
    for name in calls:
        if name not in free:
            last = None
            continue
        if last is not None and size_of[name] <= room:
            last.append(name)
        else:
            last, room = [name], max(sizes)
            result.append(last)
        room -= size_of[name]
    return result


def whole_parameters(root: nn.Module, groups: Sequence[Sequence[str]], trace: Trace) -> dict[str, str]:
    """Parameters of units that must stay whole on every data rank, by their first names, and why.

    Args:
        root: the module.
        groups: names of the modules to shard, those sharded as one together.
        trace: the traced step.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    every_name: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        every_name.setdefault(id(parameter), []).append(name)
    glue = {*trace.tail_parameters, *trace.everywhere}.union(*(call.glue_parameters for call in trace.calls))
    changed = {trace.calls[index].unit for index, _ in trace.mutated}
    in_place = {call.unit for call in trace.calls if call.in_place}
    reasons: dict[str, str] = {}
    for group in groups:
        parameters = {id(p): p for unit in group for p in root.get_submodule(unit).parameters()}
        dtypes = Counter(p.dtype for p in parameters.values() if p.is_floating_point())
        common = dtypes.most_common(1)[0][0] if dtypes else None
        prefixes = tuple(f"{unit}." for unit in group)
        for key, parameter in parameters.items():
            # torch's hooks sit on what goes in and comes out
            if in_place.intersection(group):
                reasons[names[key]] = "its block changes its inputs in place"
            elif changed.intersection(group):
                reasons[names[key]] = "what its block returns is changed in place"
            elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                reasons[names[key]] = "a hook on it wants its whole gradient"
            elif names[key] in glue:
                reasons[names[key]] = "code outside of its module uses it"
            elif not all(name.startswith(prefixes) for name in every_name[key]):
                reasons[names[key]] = "a module that is not called by itself shares it"
            elif parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_contiguous():
                reasons[names[key]] = "it is a scalar, empty or not contiguous"
            elif parameter.dtype != common:
                reasons[names[key]] = "its dtype differs from the rest of its block"
    return reasons
