"""ZeRO 2 and 3: the units of a stage by torch's ``fully_shard``, driven step by step.

Each stage on this rank has one root of its own (a module that only holds the sharded ones), so that "the last backward"
is the stage's, and gathering ahead works within the stage. The flags that torch sets from a module's own backward are
set here for every backward of the schedule: gradients are reduced in the last one of a step that reduces, and whole
parameters are freed behind the last one.

Sharded are the parameters that only the unit's own call uses. Those that glue or several units use (tied embeddings),
that several stages hold, or that cannot be cut (scalars) stay whole on every data rank and are averaged by
:class:`~lnn_lightning.parallel.data.replicate.Replica`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor

from lnn_lightning.parallel.data.settings import ZeroSettings
from lnn_lightning.parallel.data.shards import Apart
from lnn_lightning.parallel.data.unused import Unused
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.reduction import reduction_dtype
from lnn_lightning.parallel.step.hooks import keep_inside
from lnn_lightning.parallel.step.standin import is_stand_in, stand_in_for
from lnn_lightning.parallel.step.trace import Trace


@dataclass
class Shard:
    """A sharded parameter.

    Attributes:
        name: its first name in the module.
        parameter: what the module has between steps: a DTensor.
        local: this rank's piece as a plain parameter that shares its memory; what optimizers work on.
        places: modules that have it, and under which names.
        unit: the sharded module it belongs to.
    """

    name: str
    parameter: nn.Parameter
    local: nn.Parameter
    places: list[tuple[nn.Module, str]]
    unit: str

    def link(self) -> None:
        """The optimizer's view follows the module's: memory, gradient and whether it learns."""
        value, grad = self.parameter._local_tensor, self.parameter.grad  # type: ignore[attr-defined]
        if self.local.data_ptr() != value.data_ptr() or self.local.device != value.device:
            self.local.data = value.detach()
        self.local.requires_grad_(self.parameter.requires_grad)
        self.local.grad = None if grad is None else grad._local_tensor  # type: ignore[attr-defined]


class Sharding:
    """The sharded parameters of this rank's stages.

    Args:
        root: the module; its tensors are on their device.
        groups: stage -> names of the modules to shard, those that share parameters together.
        whole: names of parameters that stay whole, with the reason.
        mesh: data ranks, or replicate x shard.
        settings: which stage of ZeRO, and when to free whole parameters.
        ranks: all data ranks, also where ``mesh`` has two axes.
        reduce_dtype: in which gradients are added up; None: see :func:`reduction_dtype`.
        apart: parameters that are sharded over other ranks; None: there are none.
    """

    def __init__(
        self,
        root: nn.Module,
        groups: Mapping[int, Sequence[Sequence[str]]],
        whole: Mapping[str, str],
        mesh: DeviceMesh,
        settings: ZeroSettings,
        ranks: dist.ProcessGroup,
        reduce_dtype: torch.dtype | None = None,
        apart: Apart | None = None,
    ) -> None:
        self.settings, self.whole = settings, dict(whole)
        self._ranks, self.apart = ranks, apart
        self.behind_reduction: Callable[[], None] | None = None
        """Called when the gradients of a step are reduced."""
        self._used: set[int] = set()
        parameters = dict(root.named_parameters())
        ignored = {parameter for name, parameter in parameters.items() if name in whole or is_stand_in(parameter)}
        names = {id(parameter): name for name, parameter in parameters.items()}
        places: dict[str, list[tuple[nn.Module, str]]] = {}
        for module in root.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(names[id(parameter)], []).append((module, attribute))
        placement = self._placement(names)
        of_unit: dict[str, str] = {}
        self._units: dict[int, dict[str, FSDPModule]] = {}
        self._roots: dict[int, FSDPModule] = {}
        self._hooks: list[tuple[nn.Module, str, int]] = []
        self._members: dict[str, Sequence[str]] = {}
        self._final: dict[int, str] = {}
        for stage, stage_groups in groups.items():
            self._units[stage] = {}
            for group in stage_groups:
                modules = [root.get_submodule(name) for name in group]
                found = {p: None for module in modules for p in module.parameters() if p not in ignored}
                own = [names[id(p)] for p in found]
                if not own:
                    continue
                unit = group[0]
                self._members[unit] = group
                of_unit |= dict.fromkeys(own, unit)
                dtype = parameters[own[0]].dtype
                wide = reduction_dtype(dtype, reduce_dtype)
                policy = MixedPrecisionPolicy(reduce_dtype=wide if wide != dtype else None, cast_forward_inputs=False)
                self._units[stage][unit] = self._shard(modules, mesh, policy, ignored, placement)
            if self._units[stage]:
                holder = _Holder(
                    [root.get_submodule(name) for unit in self._units[stage] for name in self._members[unit]]
                )
                unsharded = {p for p in holder.parameters() if not isinstance(p, DTensor)}
                self._roots[stage] = fully_shard(holder, mesh=mesh, ignored_params=unsharded)
                self._roots[stage]._get_fsdp_state()._lazy_init()
        now = dict(root.named_parameters())
        self.shards = [
            Shard(name, now[name], nn.Parameter(now[name]._local_tensor.detach()), places[name], unit)  # type: ignore[attr-defined]
            for name, unit in of_unit.items()
        ]
        self.by_parameter = {id(shard.parameter): shard for shard in self.shards}
        self.link()

    def _placement(self, names: Mapping[int, str]) -> Callable[[nn.Parameter], Any] | None:
        """What tells torch over which ranks it is to shard a parameter; None: all over the same."""
        apart = self.apart
        if apart is None:
            return None
        other = ShardPlacementResult(placement=None, mesh_info=FSDPMeshInfo(apart.mesh, shard_mesh_dim=0))
        return lambda parameter: other if names.get(id(parameter)) in apart.sizes else None

    def _shard(
        self,
        modules: list[nn.Module],
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        ignored: set[nn.Parameter],
        placement: Callable[[nn.Parameter], Any] | None,
    ) -> FSDPModule:
        before = {key for module in modules for key in (*module._forward_pre_hooks, *module._forward_hooks)}
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            mp_policy=policy,
            ignored_params=ignored,
            reshard_after_forward=self.settings.stage == 3,
            shard_placement_fn=placement,
        )
        for module in modules:
            for store in ("_forward_pre_hooks", "_forward_hooks"):
                made = [key for key in getattr(module, store) if key not in before]
                keep_inside(module, made)
                self._hooks += [(module, store, key) for key in made]
        assert isinstance(modules[0], FSDPModule)
        # which parameters a step uses may depend on the data; ranks must still reduce the same ones
        modules[0].set_reduce_scatter_unused_params(True, recurse=False)
        for group in modules[0]._get_fsdp_state()._fsdp_param_groups:
            reduce = group.post_backward
            group.post_backward = partial(self._reduce, group, reduce)  # type: ignore[method-assign]
        return modules[0]

    def _reduce(self, group: Any, reduce: Callable[..., None], *args: Any) -> None:
        """Behind the backward of a unit: notes whose gradients this rank has made before they are reduced."""
        self._used.update(id(each.sharded_param) for each in group.fsdp_params if unreduced(each))
        reduce(*args)

    def prefetch(self, trace: Trace) -> None:
        """Backward gathers ahead in the order of the traced calls.

        Torch's own order is that of the last forwards: the first block of a micro-batch would call the last one of the
        micro-batch before, which may have had its last backward.
        """
        for stage, modules in self._units.items():
            order = dict.fromkeys(unit for call in trace.calls for unit in self._called(call.unit) if unit in modules)
            units = list(order)
            for before, unit in zip(units[:1] + units, units, strict=False):  # the first: itself, which does nothing
                modules[unit].set_modules_to_backward_prefetch([modules[before]])
                self._final[stage] = unit

    def _called(self, name: str) -> list[str]:
        """Sharded units that a call of a module runs."""
        return [
            unit
            for unit, members in self._members.items()
            if any(member == name or member.startswith(name + ".") for member in members)
        ]

    def link(self) -> None:
        """The optimizers' views follow the module's parameters and gradients."""
        for shard in self.shards:
            shard.link()

    def relocate(self, move: Callable[[str, Tensor], Tensor]) -> None:
        """Gives this rank's pieces other memory.

        Args:
            move: ``move(name, piece)``: the same values elsewhere.
        """
        for each in self._fsdp_parameters():
            parameter = each.sharded_param
            each._sharded_param_data = move(self.by_parameter[id(parameter)].name, each._sharded_param_data)
            piece = each._sharded_param_data.view(each.padded_sharded_param_size)
            parameter._local_tensor = piece.narrow(0, 0, parameter._local_tensor.shape[0])
        self.link()

    def _fsdp_parameters(self) -> list[Any]:
        return [each for group in self.groups() for each in group.fsdp_params]

    def groups(self) -> list[Any]:
        """Torch's groups of parameters that are gathered and reduced together."""
        modules = [module for units in self._units.values() for module in units.values()]
        return [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer has in place of a parameter: this rank's piece of a sharded one, others themselves."""
        shard = self.by_parameter.get(id(parameter))
        return parameter if shard is None else shard.local

    # ---------------------------------------------------------------- steps

    def begin(self, parts: int) -> None:
        """Before the first forward of a step of so many micro-batches."""
        hold = self.settings.stage == 2 or (parts > 1 and not self.settings.reshard_between_microbatches)
        for stage, modules in self._units.items():
            for unit, module in modules.items():
                # backward begins with the last one at once
                kept = hold or (parts == 1 and unit == self._final.get(stage))
                module.set_reshard_after_forward(not kept, recurse=False)

    def before_backward(self, stage: int, last: bool, sync: bool) -> None:
        """Before a stage's backward of a micro-batch: whether it is the step's last one, and whether it reduces."""
        if stage not in self._roots:
            return
        if last and sync:
            here = [shard.parameter for shard in self.shards if shard.unit in self._units[stage]]
            self._used.update(id(parameter) for parameter in here if parameter.grad is not None)
        self._roots[stage].set_is_last_backward(last)
        for module in self._units[stage].values():
            module.set_requires_gradient_sync(last and sync, recurse=False)
            module.set_reshard_after_backward(last or self.settings.reshard_between_microbatches, recurse=False)

    def finish(self, sync: bool) -> None:
        """Behind a step, or without gradients behind an evaluation: nothing is whole any more."""
        for stage, modules in self._units.items():
            for module in modules.values():
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    if sync and any(unreduced(each) for each in group.fsdp_params):
                        # the last backward of the step did not come by
                        group.reduce_grads = group.reshard_after_backward = True
                        group.post_backward()
                        group.finalize_backward()
            if stage in self._roots:
                self._roots[stage].reset_iter_state()
            for module in modules.values():
                module.reshard()
        if sync:
            if self.behind_reduction is not None:
                self.behind_reduction()
            self._drop_unused()

    def _drop_unused(self) -> None:
        """What no data rank has used has no gradient, as on one process."""
        learning = [shard for shard in self.shards if shard.parameter.requires_grad]
        for apart in (False, True):
            group = self.apart.mesh.get_group() if apart and self.apart is not None else self._ranks
            of_group = [shard.parameter for shard in learning if self.is_apart(shard.name) == apart]
            Unused(of_group, group, [id(parameter) not in self._used for parameter in of_group]).drop()
        self._used.clear()

    def is_apart(self, name: str) -> bool:
        """Whether a parameter is sharded over other ranks than the rest."""
        return self.apart is not None and name in self.apart.sizes

    def gathered(self) -> list[Tensor]:
        """Whole parameters that are here at the moment."""
        whole = [each._unsharded_param for each in self._fsdp_parameters() if hasattr(each, "_unsharded_param")]
        return [tensor for tensor in whole if tensor.untyped_storage().nbytes()]

    def abandon(self) -> None:
        """After an error half-way through a step: parameters are sharded again, gradients made so far are lost."""
        for root in self._roots.values():
            root.reset_iter_state()
        self.forget()

    def forget(self) -> None:
        """Drops gradients that were not reduced: of an accumulation window that was broken off."""
        self._used.clear()
        for each in self._fsdp_parameters():
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None

    # ---------------------------------------------------------------- other steps than the one it was made for

    def used_outside(self, trace: Trace) -> dict[str, str]:
        """Sharded parameters that a step uses other than by a call of their module -> who uses them."""
        of = {shard.name: shard.unit for shard in self.shards}
        found: dict[str, str] = {name: "the end of the step" for name in (*trace.tail_parameters, *trace.everywhere)}
        for call in trace.calls:
            found |= dict.fromkeys(call.glue_parameters, f"the code before {call.unit!r}")
            run = self._called(call.unit)
            own = call.parameters - call.glue_parameters
            found |= {name: repr(call.unit) for name in own if name in of and of[name] not in run}
        return {name: user for name, user in found.items() if name in of}

    def check(self, kind: str, trace: Trace) -> None:
        """A training step must use sharded parameters by calling their modules alone.

        Raises:
            StepError: it does not.
        """
        for name, user in self.used_outside(trace).items():
            raise StepError(
                f"{kind} uses {name!r} outside of {self._unit_of(name)!r} in {user}, which the step that the "
                "parameters were sharded for did not. Call the module instead, or use `zero_stage=1`."
            )

    def hold_open(self, trace: Trace) -> None:
        """Makes whole, for an evaluation step, what it uses other than by a call; :meth:`finish` ends it."""
        units = {self._unit_of(name) for name in self.used_outside(trace)}
        for modules in self._units.values():
            for unit, module in modules.items():
                if unit in units:
                    module.set_reshard_after_forward(False, recurse=False)
                    module.unshard()

    def _unit_of(self, name: str) -> str:
        return next(shard.unit for shard in self.shards if shard.name == name)

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Inside, the module's parameters have their whole shapes and no values, and nothing is gathered: to trace."""
        removed: list[tuple[dict[int, Any], list[tuple[int, Any]]]] = []
        try:
            for module, store, key in self._hooks:
                hooks = getattr(module, store)
                removed.append((hooks, list(hooks.items())))
                hooks.pop(key, None)
            for shard in self.shards:
                blank = _stand_in(shard.parameter)
                for module, attribute in shard.places:
                    _set_parameter(module, attribute, blank)
            yield
        finally:
            for hooks, items in reversed(removed):
                hooks.clear()
                hooks.update(items)
            for shard in self.shards:
                for module, attribute in shard.places:
                    _set_parameter(module, attribute, shard.parameter)


class _Holder(nn.Module):
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)


def unreduced(parameter: Any) -> bool:
    """Whether one of torch's parameters has a gradient of this rank alone."""
    return parameter.unsharded_accumulated_grad is not None or (
        hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None
    )


def _stand_in(parameter: Tensor) -> nn.Parameter:
    blank = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    made = stand_in_for(nn.Parameter(blank, requires_grad=parameter.requires_grad))
    assert isinstance(made, nn.Parameter)
    return made


def _set_parameter(module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
    # modules with a `__setattr__` of their own (RNNs) keep lists of their parameters
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attribute] = parameter
    else:
        setattr(module, attribute, parameter)
