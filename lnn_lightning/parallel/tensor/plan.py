"""The tensor-parallel plan of a whole module: plans of its units, made to agree on the parameters they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.trace import Key, TensorInfo, Trace
from lnn_lightning.parallel.tensor.axis import Spec
from lnn_lightning.parallel.tensor.layers import REPLICATE, Role
from lnn_lightning.parallel.tensor.planner import UnitPlanner
from lnn_lightning.parallel.tensor.trial import CallSample
from lnn_lightning.parallel.tensor.units import UnitPlan, sequence_spec

ROLES = {"colwise": "column", "rowwise": "row", "replicate": "replicate"}
"""Words of a user's ``tensor_parallel_plan`` (transformers' and torch's) -> roles."""

KEPT_WHOLE = "lnn_kept_whole"
"""Attribute of modules whose layers are not divided: experts that are to be shared out."""

_LARGE = 0.01
"""Share of the parameters from which on a vocabulary is divided."""


@dataclass(eq=False)
class TensorPlan:
    """Who has which part of what.

    Attributes:
        size: number of tensor ranks.
        units: name of a called unit -> its plan.
        specs: first name of a parameter -> the part of it that a rank has; others are whole everywhere.
        shapes: first name of such a parameter -> shape of the whole.
        partial: first names of whole parameters whose gradients must be added up over the ranks.
        undivided: called unit without a plan -> the reason.
    """

    size: int
    units: dict[str, UnitPlan] = field(default_factory=dict)
    specs: dict[str, Spec] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    undivided: dict[str, str] = field(default_factory=dict)

    def parts(self, trace: Trace) -> dict[Key, Spec]:
        """Unit outputs that stay sharded along their tokens, with how."""
        found: dict[Key, Spec] = {}
        for call in trace.calls:
            plan = self.units.get(call.unit)
            if plan is None or plan.sequence is None or plan.output >= len(call.outputs):
                continue
            info = call.outputs[plan.output]
            if isinstance(info, TensorInfo) and (spec := sequence_spec(info, plan.sequence, self.size)) is not None:
                found[call.index, plan.output] = spec
        return found


def plan_module(
    root: nn.Module,
    trace: Trace,
    size: int,
    sequence: bool,
    twins: Mapping[str, str],
    given: Mapping[str, str] | None = None,
    vetoed_units: Mapping[str, str] | None = None,
) -> TensorPlan:
    """Plans every unit that the traced step calls. The same on all ranks.

    Args:
        root: the module, whole.
        trace: the traced step.
        size: number of tensor ranks.
        sequence: keep values between units sharded along their tokens where possible.
        twins: unit that the step does not call (an average of weights, say) -> the called unit it is a copy of.
        given: the user's ``tensor_parallel_plan``: glob of module names -> role.
        vetoed_units: units that must not be divided, with the reason.

    Raises:
        StepError: the user's plan names no module, or gives a layer a role it cannot have.
    """
    wanted = _given_roles(root, given or {})
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    glue = set(trace.tail_parameters) | set(trace.everywhere)
    for call in trace.calls:
        glue |= call.glue_parameters
    samples = _samples(trace)
    # a hook on a parameter wants its whole gradient, as code outside of the units does
    glue |= {name for name, each in root.named_parameters() if each._backward_hooks or each._post_accumulate_grad_hooks}
    kept = [module for module in root.modules() if vars(module).get(KEPT_WHOLE)]
    glue |= {names[id(parameter)] for module in kept for parameter in module.parameters()}
    fixed: dict[str, Role] = {name: REPLICATE for name in glue}
    fixed |= {name: role for name, role in wanted.items() if name not in glue}
    vetoed = dict(vetoed_units or {})
    while True:
        plan, conflicts = _planned(root, names, trace, samples, size, sequence, fixed, vetoed, glue)
        if not conflicts:
            break
        for name, units in conflicts.items():
            if name in fixed and fixed[name] == REPLICATE:
                vetoed |= dict.fromkeys(units, f"{name!r} is used by it and by others in different ways")
            fixed[name] = REPLICATE
    _check_given(root, wanted, plan, size)
    for twin, original in twins.items():
        if original in plan.units:
            _plan_twin(root, names, twin, original, plan)
    return plan


def refuse_compiled(root: nn.Module) -> None:
    """Compiled code does not see which values are parts.

    Raises:
        StepError: a sub-module is compiled.
    """
    for name, module in root.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            raise StepError(
                f"{name!r} is compiled: compiled code cannot compute with values that are divided over tensor ranks. "
                "Leave `torch.compile` out, or use `tensor_parallel_size=1` (a pipeline and ZeRO work with compiled "
                "blocks)."
            )


def _plan_twin(root: nn.Module, names: Mapping[int, str], twin: str, original: str, plan: TensorPlan) -> None:
    """Divides a copy as its original: what goes from one to the other does so part by part."""
    source, copy = root.get_submodule(original), dict(root.get_submodule(twin).named_parameters())
    plan.units[twin] = plan.units[original]
    for name, parameter in source.named_parameters():
        spec = plan.specs.get(names[id(parameter)])
        if spec is not None and name in copy and copy[name].shape == parameter.shape:
            plan.specs.setdefault(names[id(copy[name])], spec)
            plan.shapes.setdefault(names[id(copy[name])], tuple(parameter.shape))


def _planned(
    root: nn.Module,
    names: Mapping[int, str],
    trace: Trace,
    samples: Mapping[str, list[CallSample]],
    size: int,
    sequence: bool,
    fixed: Mapping[str, Role],
    vetoed: Mapping[str, str],
    glue: set[str],
) -> tuple[TensorPlan, dict[str, list[str]]]:
    plan = TensorPlan(size)
    large = _large(root, names)
    decided = dict(fixed)
    known: dict[Any, tuple[UnitPlan | None, str]] = {}
    users: dict[str, list[tuple[str, Spec | None, bool]]] = {}
    for unit_name in _in_order(root, trace):
        unit = root.get_submodule(unit_name)
        local = {name: names[id(parameter)] for name, parameter in unit.named_parameters()}
        if not local:
            continue
        own_fixed = {name: decided[first] for name, first in local.items() if first in decided}
        own_large = frozenset(name for name, first in local.items() if first in large)
        if unit_name in vetoed:
            found, reason = None, vetoed[unit_name]
        else:
            found, reason = _plan_unit(unit, samples[unit_name], size, sequence, own_fixed, own_large, known)
        if found is None:
            plan.undivided[unit_name] = reason
        else:
            plan.units[unit_name] = found
            decided |= {local[name]: role for name, role in found.roles.items() if name in local}
        for name, first in local.items():
            spec = local_spec(found, name) if found is not None else None
            users.setdefault(first, []).append((unit_name, spec, found is not None and name in found.partial))
    parameters = dict(root.named_parameters())
    conflicts: dict[str, list[str]] = {}
    for name, uses in users.items():
        specs, partial = {spec for _, spec, _ in uses}, {part for _, _, part in uses}
        units = [unit for unit, _, _ in uses]
        if len(specs) > 1 or len(partial) > 1 or (name in glue and (partial == {True} or specs != {None})):
            conflicts[_weight_of(name, plan, units, root, names)] = units
        elif (spec := next(iter(specs))) is not None:
            plan.specs[name] = spec
            plan.shapes[name] = tuple(parameters[name].shape)
        elif partial == {True}:
            plan.partial |= {name}
    return plan, conflicts


def _samples(trace: Trace) -> dict[str, list[CallSample]]:
    """What each unit is called with, in every way it is called."""
    losses = {key for loss in trace.losses if not loss.inside for key in loss.reads}
    read_later = {key for call in trace.calls for key in call.needs}
    samples: dict[str, list[CallSample]] = {}
    for unit, calls in trace.inputs.items():
        numbers = {call.index for call in trace.calls if call.unit == unit}
        opened = frozenset(leaf for index, leaf in losses - read_later if index in numbers)
        samples[unit] = [CallSample(leaves, unflatten, opened) for leaves, unflatten in calls]
    return samples


def _plan_unit(
    unit: nn.Module,
    samples: Sequence[CallSample],
    size: int,
    sequence: bool,
    fixed: Mapping[str, Role],
    large: frozenset[str],
    known: dict[Any, tuple[UnitPlan | None, str]],
) -> tuple[UnitPlan | None, str]:
    """Plans a unit, or takes the plan of one just like it."""
    sample = samples[0]
    key = (
        type(unit),
        tuple(
            (name, parameter.shape, parameter.dtype, parameter.requires_grad)
            for name, parameter in unit.named_parameters()
        ),
        sample.signature,
        sample.loss_outputs,
        tuple(sorted((name, str(role), role.sections) for name, role in fixed.items())),
        large,
    )
    planner = UnitPlanner(unit, sample, size, fixed, large)
    if key not in known or not planner.agrees(known[key][0]):
        known[key] = planner.plan(sequence)
    found, reason = known[key]
    for other in samples[1:]:
        if found is None:
            break
        found, problem = UnitPlanner(unit, other, size, fixed, large).widened(found)
        reason = problem or "its code fails on tensors without data"
    return found, reason


def _in_order(root: nn.Module, trace: Trace) -> Iterator[str]:
    """Called units: those that hold others first, embeddings after the layers they may share a table with."""
    called = list(dict.fromkeys(trace.names))

    def is_table(name: str) -> bool:
        parameters = list(root.get_submodule(name).parameters())
        return len(parameters) == 1 and any(
            isinstance(each, nn.Embedding) for each in root.get_submodule(name).modules()
        )

    yield from sorted(called, key=lambda name: (is_table(name), name.count(".")))


def _large(root: nn.Module, names: Mapping[int, str]) -> set[str]:
    """Weights worth dividing for their size, or because an embedding shares its table with a layer."""
    total = sum(parameter.numel() for parameter in root.parameters())
    large = {name for name, parameter in root.named_parameters() if parameter.numel() >= _LARGE * total}
    owners: dict[int, int] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return large | {names[key] for key, count in owners.items() if count > 1 and key in names}


def local_spec(plan: UnitPlan, name: str) -> Spec | None:
    """Part of a unit's parameter (named within the unit) that a rank has."""
    if name in plan.roles:
        return plan.roles[name].weight_spec(name in plan.transposed)
    weight = plan.biases.get(name)
    return plan.roles[weight].bias_spec if weight is not None else None


def _weight_of(name: str, plan: TensorPlan, units: Sequence[str], root: nn.Module, names: Mapping[int, str]) -> str:
    """The weight whose role decides about a parameter: itself, or the one it is the bias of."""
    for unit_name in units:
        if (unit_plan := plan.units.get(unit_name)) is None:
            continue
        for local, parameter in root.get_submodule(unit_name).named_parameters():
            if names[id(parameter)] == name and local in unit_plan.biases:
                weight = root.get_submodule(unit_name).get_parameter(unit_plan.biases[local])
                return names[id(weight)]
    return name


def _given_roles(root: nn.Module, given: Mapping[str, str]) -> dict[str, Role]:
    """Role of each weight that a user's plan names."""
    layers = {
        name: module
        for name, module in root.named_modules()
        if name and next(module.parameters(recurse=False), None) is not None
    }
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    wanted: dict[str, Role] = {}
    for pattern, word in given.items():
        if word not in ROLES:
            raise StepError(
                f"`tensor_parallel_plan` gives {pattern!r} the role {word!r}. Roles are "
                f"{', '.join(repr(each) for each in ROLES)}."
            )
        fitting = [name for name in layers if fnmatchcase(name, pattern)]
        if not fitting:
            raise StepError(
                f"`tensor_parallel_plan` names {pattern!r}, which fits no layer of {type(root).__name__}. Layers are "
                f"named as in `named_modules()`, for example {', '.join(repr(name) for name in list(layers)[:4])}; a "
                "glob such as '*.q_proj' or 'blocks.*' names many."
            )
        for name in fitting:
            matrices = [each for each in layers[name].parameters(recurse=False) if each.ndim > 1]
            wanted |= {names[id(each)]: Role(ROLES[word]) for each in matrices}  # type: ignore[arg-type]
        if not any(each.ndim > 1 for name in fitting for each in layers[name].parameters(recurse=False)):
            raise StepError(
                f"`tensor_parallel_plan` gives {pattern!r} a role, but {fitting[0]!r} has no weight matrix to divide. "
                "Leave it out."
            )
    return wanted


def _check_given(root: nn.Module, wanted: Mapping[str, Role], plan: TensorPlan, size: int) -> None:
    found = {}
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for unit_name, unit_plan in plan.units.items():
        unit = root.get_submodule(unit_name)
        for name, role in unit_plan.roles.items():
            found[names[id(unit.get_parameter(name))]] = role
    for name, role in wanted.items():
        got = found.get(name, REPLICATE)
        if got.kind != role.kind and not (role.kind == "column" and got.kind == "vocabulary"):
            shape = tuple(root.get_parameter(name).shape)
            causes = [reason for unit, reason in plan.undivided.items() if name.startswith(unit + ".") or not unit]
            cause = causes[0] if causes else "its divided dimension is no multiple of that, or no linear layer uses it"
            raise StepError(
                f"`tensor_parallel_plan` wants {name!r} of shape {shape} to be {role.kind}, which is not possible over "
                f"{size} tensor ranks: {cause}. Leave it out, or change `tensor_parallel_size`."
            )
