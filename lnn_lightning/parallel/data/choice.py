"""What ZeRO 2 and 3 shard: which modules, and which of their parameters must stay whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.data.sharding import Sharding
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
    """
    units = {
        stage: shardable_units(root, [name for name in names if ownership.units[name] == {stage}], trace)
        for stage in stages
    }
    keep = {name for name, where in ownership.tensors.items() if len(where) > 1}
    parameters = {name for name, _ in root.named_parameters()}
    chosen = [name for stage_units in units.values() for name in stage_units]
    return Sharding(root, units, whole_parameters(root, chosen, trace, keep & parameters), mesh, settings)


def shardable_units(root: nn.Module, names: Sequence[str], trace: Trace) -> list[str]:
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


def whole_parameters(root: nn.Module, units: Sequence[str], trace: Trace, keep: set[str]) -> dict[str, str]:
    """Parameters that must stay whole on every data rank, by their first names, and why.

    Args:
        root: the module.
        units: modules to be sharded.
        trace: the traced step.
        keep: names of parameters that other stages hold too.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    reasons = {name: "several stages hold it" for name in keep}
    glue = {*trace.tail_parameters, *trace.everywhere}
    for call in trace.calls:
        glue |= call.glue_parameters
    users: dict[int, set[str]] = {}
    inside: set[int] = set()
    for unit in units:
        parameters = list(root.get_submodule(unit).parameters())
        dtypes = Counter(parameter.dtype for parameter in parameters if parameter.is_floating_point())
        common = dtypes.most_common(1)[0][0] if dtypes else None
        for parameter in parameters:
            users.setdefault(id(parameter), set()).add(unit)
            inside.add(id(parameter))
            name = names[id(parameter)]
            if name in glue:
                reasons[name] = "code outside of its module uses it"
            elif parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_contiguous():
                reasons[name] = "it is a scalar, empty or not contiguous"
            elif parameter.dtype != common or parameter.is_complex():
                reasons[name] = "its dtype differs from the rest of its block"
    for name, parameter in root.named_parameters():
        if len(users.get(id(parameter), ())) > 1:
            reasons[name] = "several blocks share it"
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not any(name.startswith(unit + ".") for unit in users[id(parameter)]):
            reasons[names[id(parameter)]] = "several modules share it"
    return reasons
