"""Cuts a module by its plan: parameters become this rank's parts, layers and units get their sharded forms."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.reduction import reduction_dtype
from lnn_lightning.parallel.step.standin import StandInParameter, is_stand_in
from lnn_lightning.parallel.step.trace import Trace
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, join_parts, reduced_shape, spans_of_part, take_part
from lnn_lightning.parallel.tensor.layers import REPLICATE, Role
from lnn_lightning.parallel.tensor.modules import (
    LayerRole,
    has_forward,
    is_conv1d,
    linear_forward,
    multihead_forward,
    sharding_suspended,
    take_forward,
)
from lnn_lightning.parallel.tensor.plan import TensorPlan
from lnn_lightning.parallel.tensor.planner import UnitPlanner
from lnn_lightning.parallel.tensor.trial import CallSample, forward_with_rules
from lnn_lightning.parallel.tensor.units import UnitPlan, UnitState, unit_forward


class TensorSharding:
    """A cut module on this rank.

    Args:
        root: the module, whole but for what lives on other pipeline stages.
        plan: its plan.
        axis: the tensor ranks.
    """

    def __init__(self, root: nn.Module, plan: TensorPlan, axis: TensorAxis) -> None:
        self.root, self.plan = root, plan
        self.outside = replace(axis, inside=False)
        self.inside = replace(axis, inside=True)
        self._followed: set[Any] = set()
        self._here: set[str] = set()

    def install(self) -> None:
        """Cuts parameters in place (the objects stay) and gives layers and units their sharded ``forward``."""
        gc.collect()  # graphs of the traced step would remember the whole shapes
        replaced: dict[int, nn.Parameter] = {}
        for name, parameter in self.root.named_parameters():
            if (spec := self.plan.specs.get(name)) is not None and not is_stand_in(parameter):
                parameter.data = self.part(spec, parameter.data)
                if remembers_whole(parameter):
                    replaced[id(parameter)] = nn.Parameter(parameter.data, parameter.requires_grad)
        for module in self.root.modules() if replaced else ():
            for key, each in module._parameters.items():
                module._parameters[key] = replaced.get(id(each), each)
        for name, plan in self.plan.units.items():
            unit = self.root.get_submodule(name)
            if not all(is_stand_in(parameter) for parameter in unit.parameters()):
                install_unit(unit, plan, self.inside, self.outside)
                self._here.add(name)

    def part(self, spec: Spec, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter (or of its gradient or optimizer state), as a tensor of its own."""
        return take_part(whole, spec, self.outside.size, self.outside.rank).clone(memory_format=torch.contiguous_format)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The whole of a parameter, gradient or state of this name from its parts. Collective over the tensor ranks."""
        spec = self.plan.specs.get(name)
        if spec is None or part.shape != self.local_shape(name):
            return part
        return join_parts(self.outside.all_gather(part.detach()), spec)

    def local(self, name: str, whole: Tensor, reduced: Sequence[int] = ()) -> Tensor:
        """This rank's part of a whole parameter, gradient or state of this name (one element along reduced dims)."""
        spec = self.plan.specs.get(name)
        if spec is None or spec.dim in reduced or whole.shape != reduced_shape(self.plan.shapes[name], reduced):
            return whole
        return self.part(spec, whole)

    def is_divided(self, name: str) -> bool:
        """Whether each tensor rank holds a part of its own of a parameter."""
        return name in self.plan.specs

    def spans(self, name: str) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """The divided dimension of a parameter and where this rank's part of it lies in the whole."""
        spec = self.plan.specs[name]
        return [(spec.dim, spans_of_part(spec, self.outside.size, self.outside.rank))]

    def whole_shape(self, name: str) -> torch.Size:
        """Shape of the whole of a divided parameter."""
        return torch.Size(self.plan.shapes[name])

    def local_shape(self, name: str) -> torch.Size:
        """Shape of a rank's part of a divided parameter."""
        return torch.Size(self.plan.specs[name].part_shape(self.plan.shapes[name], self.outside.size))

    def settle_gradients(
        self,
        local_of: Callable[[Tensor], Tensor],
        reduce_dtype: torch.dtype | None = None,
        apart: Collection[str] = (),
    ) -> None:
        """Makes the gradients of whole parameters equal on all tensor ranks, in one all-reduce a dtype.

        Partial ones (each rank used the parameter on its part of the values alone) are added up. Others are equal but
        for what atomic additions on an accelerator do; their mean keeps the ranks from drifting apart.

        Args:
            local_of: what this data rank has of a tensor.
            reduce_dtype: in which the ranks' gradients are added up; None: see :func:`reduction_dtype`.
            apart: names of parameters that tensor ranks do not have in common (experts).
        """
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, bool]]] = {}
        for name, parameter in self.root.named_parameters():
            if name in self.plan.specs or name in apart or is_stand_in(parameter) or not parameter.requires_grad:
                continue
            if parameter.grad is None:  # unused, and so on all tensor ranks: they run the same code
                continue
            partial, gradient = name in self.plan.partial, local_of(parameter.grad)
            by_kind.setdefault((gradient.dtype, gradient.device), []).append((gradient, partial))
        for (dtype, _), pairs in by_kind.items():
            gradients = [gradient for gradient, _ in pairs]
            wide = reduction_dtype(dtype, reduce_dtype)
            shares = [(each.to(wide), 1 if partial else self.outside.size) for each, partial in pairs]
            flat = torch.cat([(each if size == 1 else each / size).reshape(-1) for each, size in shares])
            dist.all_reduce(flat, group=self.outside.group)
            for gradient, settled in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(settled.view(gradient.shape))

    def drifted(self, local_of: Callable[[Tensor], Tensor], apart: Collection[str] = ()) -> list[str]:
        """Names of whole parameters on this rank that are not bit for bit the same on all tensor ranks. Collective."""
        whole = [
            (name, local_of(parameter.detach()))
            for name, parameter in self.root.named_parameters()
            if name not in self.plan.specs and name not in apart and not is_stand_in(parameter)
        ]
        if not whole:
            return []
        sums = torch.stack([_checksum(value) for _, value in whole])
        lowest, highest = sums.clone(), sums.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.outside.group)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.outside.group)
        return [name for (name, _), differs in zip(whole, (lowest != highest).tolist(), strict=True) if differs]

    def follow(self, trace: Trace) -> None:
        """Makes the plan right for a step traced later (other shapes); call with whole shapes in place.

        Raises:
            StepError: a unit is used in a way that its plan does not allow.
        """
        for name, calls in trace.inputs.items():
            plan = self.plan.units.get(name) if name in self._here else None
            for leaves, unflatten in calls if plan is not None else ():
                assert plan is not None
                sample = CallSample(leaves, unflatten, plan.open_outputs)
                if (id(plan), sample.signature) not in self._followed:
                    self._followed.add((id(plan), sample.signature))
                    self._widen(name, plan, sample)

    def _widen(self, name: str, plan: UnitPlan, sample: CallSample) -> None:
        unit = self.root.get_submodule(name)
        others = {each: REPLICATE for each, _ in unit.named_parameters() if each not in plan.roles}
        wider, problem = UnitPlanner(unit, sample, self.outside.size, others, frozenset(plan.roles)).widened(plan)
        if wider is None and problem is None:
            return  # the unit's own code fails: its own error is the one to see
        if wider is None:
            raise StepError(
                f"{name!r} is used in another way with batches of this shape than when its layers were divided over "
                f"the tensor ranks: {problem}. Set `tensor_parallel_plan={{'{name}.*': 'replicate'}}`."
            )
        if wider.partial == plan.partial:
            return
        plan.partial = wider.partial
        first_names = {id(parameter): first for first, parameter in self.root.named_parameters()}
        for other, other_plan in self.plan.units.items():
            if other_plan is plan:
                module = self.root.get_submodule(other)
                local = dict(module.named_parameters())
                self.plan.partial |= {first_names[id(local[each])] for each in plan.partial}
                if isinstance(state := getattr(module, "lnn_unit", None), UnitState):
                    state.shared = tuple((owner, key) for owner, key, each in _owners(module) if each in plan.partial)

    @contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """For tracing: divided parameters have their whole shape inside (no data), and modules their own forward."""
        saved: list[tuple[dict[str, Any], str, Any]] = []
        names = {id(parameter): name for name, parameter in self.root.named_parameters()}
        made: dict[str, Tensor] = {}
        try:
            for module in self.root.modules():
                for key, parameter in list(module._parameters.items()):
                    name = names.get(id(parameter))
                    if parameter is None or name is None or (shape := self.plan.shapes.get(name)) is None:
                        continue
                    if tuple(parameter.shape) == shape:  # it lives elsewhere
                        continue
                    if name not in made:
                        made[name] = blank_of(parameter, shape)
                    saved.append((module._parameters, key, parameter))
                    module._parameters[key] = made[name]  # type: ignore[assignment]
            with sharding_suspended():
                yield
        finally:
            for store, key, parameter in saved:
                store[key] = parameter


def is_divided(module: nn.Module) -> bool:
    """Whether any sub-module was given a sharded form."""
    return any("lnn_unit" in vars(each) for each in module.modules())


def remembers_whole(parameter: nn.Parameter) -> bool:
    """Whether a graph made before the cut is alive somewhere, so that gradients of the old shape are expected."""
    if not parameter.requires_grad:
        return False
    with torch.inference_mode(False), torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return tuple(node._input_metadata[0].shape) != tuple(parameter.shape)  # type: ignore[union-attr]


def _checksum(value: Tensor) -> Tensor:
    """A number that depends on every bit of a tensor and its place."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = value.contiguous().view(integers).reshape(-1).long()
    return (bits * (torch.arange(bits.numel(), device=bits.device) * 2 + 1)).sum()  # wraps around


def blank_of(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A stand-in of another shape for a parameter, to trace with."""
    blank = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(shape)
    return torch.Tensor._make_subclass(StandInParameter, blank, parameter.requires_grad)


def install_unit(unit: nn.Module, plan: UnitPlan, inside: TensorAxis, outside: TensorAxis) -> None:
    """Gives the layers of a unit, whose parameters are cut already, and the unit itself their sharded forms."""
    bare: list[tuple[nn.Module, str, Role]] = []
    shared: list[tuple[nn.Module, str]] = []
    has_attention = False
    owners = list(_owners(unit))
    inner = {id(module.out_proj) for module in unit.modules() if isinstance(module, nn.MultiheadAttention)}
    state = UnitState(plan, inside, outside)
    for module, key, name in owners:
        role = plan.roles.get(name, REPLICATE)
        if name in plan.partial:
            shared.append((module, key))
        if role == REPLICATE:
            continue
        is_linear = type(module).forward is nn.Linear.forward or (is_conv1d(module) and key == "weight")
        is_linear = is_linear and "forward" not in vars(module) and id(module) not in inner
        if is_linear and role.kind in ("column", "row"):
            module.lnn_layer = LayerRole(role, state)  # type: ignore[assignment]
            take_forward(module, linear_forward)
        elif not has_forward(module, linear_forward):
            bare.append((module, key, role))
    divided = {id(module) for module, _, name in owners if plan.roles.get(name, REPLICATE) != REPLICATE}
    for module in unit.modules():
        if isinstance(module, nn.MultiheadAttention):
            has_attention = True
            reaches = {id(module), id(module.out_proj)}
            if reaches & divided and forward_with_rules(module) is multihead_forward:
                take_forward(module, multihead_forward)
    buffered = tuple(module for module in unit.modules() if module._buffers)
    state.bare, state.shared = tuple(bare), tuple(shared)
    state.has_attention, state.buffered = has_attention, buffered
    unit.lnn_unit = state  # type: ignore[assignment]
    if not has_forward(unit, unit_forward):
        take_forward(unit, unit_forward)


def _owners(unit: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Every place a parameter of a unit is registered at: module, key there, and the parameter's first name."""
    names = {id(parameter): name for name, parameter in unit.named_parameters()}
    for module in unit.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield module, key, names[id(parameter)]
