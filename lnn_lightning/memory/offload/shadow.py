"""An optimizer's own step on parameters, gradients and state that are given to it.

The user's optimizer object stays as it is. A shadow of it (same class, attributes and options, no hooks) steps in its
place on what is here now: a part of a parameter, with that part of its state.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_OWN = ("step", "zero_grad", "load_state_dict", "state", "param_groups", "grad_scale", "found_inf")
"""Attributes that a shadow does not take over: those replaced on the object, and what belongs to its parameters."""


@dataclass(frozen=True)
class Snapshot:
    """An optimizer at the moment of its step; schedulers may change it while the step goes on.

    Attributes:
        kind: its class.
        attributes: all but its parameters and their state.
        options: of each group.
        arguments: further arguments of ``step``.
    """

    kind: type[Optimizer]
    attributes: dict[str, Any]
    options: list[dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)


def snapshot(optimizer: Optimizer, arguments: Mapping[str, Any] | None = None) -> Snapshot:
    """What a step that begins now must use, whenever it is done."""
    attributes = {
        name: OrderedDict() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if name not in _OWN
    }
    options = [
        {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _PARAMETERS}
        for group in optimizer.param_groups
    ]
    return Snapshot(type(optimizer), attributes, options, dict(arguments or {}))


_PARAMETERS = ("params", "param_names")


@dataclass(frozen=True)
class Changes:
    """What a step changed besides parameters and their state: counters in attributes or groups."""

    attributes: dict[str, Any]
    options: dict[str, Any]

    def __bool__(self) -> bool:
        return bool(self.attributes or self.options)

    def apply(self, optimizer: Optimizer, group: int) -> None:
        """Makes them on the optimizer itself."""
        vars(optimizer).update(self.attributes)
        optimizer.param_groups[group].update(self.options)


@torch.no_grad()
def step_on(now: Snapshot, group: int, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> Changes:
    """Steps on some parameters of one group.

    Args:
        now: the optimizer.
        group: number of the group.
        parameters: tensors with gradients.
        states: state of each; changed in place, an empty one is made as the optimizer makes it.
    """
    shadow: Any = object.__new__(now.kind)
    shadow.__dict__.update(now.attributes)
    options = {**now.options[group], "params": list(parameters)}
    before = dict(options)
    if _takes_fused(options) and all(map(_suits_fused, parameters)):
        options["fused"] = True
    shadow.param_groups = [options]
    shadow.state = defaultdict(dict)
    for parameter, state in zip(parameters, states, strict=True):
        if state:
            shadow.state[parameter] = state
    with torch.enable_grad():  # as it is called in a training loop
        step_function(now.kind)(shadow, **now.arguments)
    for parameter, state in zip(parameters, states, strict=True):
        if (made := shadow.state.get(parameter, state)) is not state:
            state.update(made)
    if before.get("fused") is None and "fused" in before:
        options["fused"] = None
    attributes = {
        k: v
        for k, v in vars(shadow).items()
        if k not in ("state", "param_groups", _CHECKED) and v is not now.attributes.get(k, _MISSING)
    }
    changed = {k: v for k, v in options.items() if k != "params" and v is not before.get(k, _MISSING)}
    return Changes(attributes, changed)


_MISSING = object()
_CHECKED = "_need_device_dtype_check_for_fused"
"""Where torch's own remember that their fused form was allowed."""


def step_function(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step of an optimizer's class without what torch puts around it to call hooks."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _suits_fused(parameter: Tensor) -> bool:
    dense = parameter.grad is None or parameter.grad.layout is torch.strided
    return parameter.device.type == "cpu" and parameter.is_floating_point() and dense


def _takes_fused(options: Mapping[str, Any]) -> bool:
    """Whether torch has a fused form of it and the user chose none."""
    return (
        options.get("fused", False) is None
        and options.get("foreach") is None
        and not options.get("differentiable", False)
        and not options.get("capturable", False)
    )
