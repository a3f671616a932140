"""The setup check: each kind of unit, divided, against itself undivided; results and gradients.

The plan is right by construction as long as every rule is, and every operation is seen. This is the net below: what
does not give the same numbers is not divided, and that is said.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from lnn_lightning.parallel.comparison import RESULT, Pair, first_difference
from lnn_lightning.parallel.step.randomness import preserved_rng, reseed
from lnn_lightning.parallel.step.shapes import own_object
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.parallel.step.trace import Trace
from lnn_lightning.parallel.step.tree import Unflatten, tree_tensors
from lnn_lightning.parallel.tensor.axis import TensorAxis, take_part
from lnn_lightning.parallel.tensor.install import install_unit
from lnn_lightning.parallel.tensor.plan import TensorPlan, local_spec
from lnn_lightning.parallel.tensor.sharded import wholes
from lnn_lightning.parallel.tensor.units import UnitPlan

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}  # some blocks compute a norm in fp32 whatever they are given


def check_units(
    root: nn.Module, plan: TensorPlan, trace: Trace, axis: TensorAxis, device: torch.device
) -> dict[str, str]:
    """Units on this rank that do not give the same numbers divided, with what is wrong.

    Collective over the tensor ranks. One unit of each kind is tried, on made-up values of the traced shapes.

    Args:
        root: the module with whole parameters (or stand-ins).
        plan: its plan.
        trace: the traced step.
        axis: the tensor ranks.
        device: where to compute.
    """
    failed: dict[str, str] = {}
    tried: set[int] = set()
    for name, unit_plan in plan.units.items():
        unit = root.get_submodule(name)
        if id(unit_plan) in tried or name not in trace.inputs or not _is_here(unit):
            continue
        leaves, unflatten = trace.inputs[name][0]
        problem = _compare(unit, unit_plan, leaves, unflatten, axis, device)
        tried.add(id(unit_plan))
        if problem:
            failed |= {other: problem for other, each in plan.units.items() if each is unit_plan}
    return failed


def agreed_failures(failed: Mapping[str, str]) -> dict[str, str]:
    """What failed on any rank. Collective over all ranks."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, dict(failed))
    return {name: problem for each in reversed(everyones) for name, problem in each.items()}


def _is_here(unit: nn.Module) -> bool:
    return not any(is_stand_in(each) or each.is_meta for each in [*unit.parameters(), *unit.buffers()])


@dataclass
class _Result:
    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]


class _NoDropout(TorchFunctionMode):
    """Dropout keeps everything inside."""

    _DROPOUTS = frozenset((F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        return func(*args, **kwargs)


def _compare(
    unit: nn.Module,
    plan: UnitPlan,
    leaves: Sequence[Any],
    unflatten: Unflatten,
    axis: TensorAxis,
    device: torch.device,
) -> str:
    """What differs; empty if nothing does."""
    with preserved_rng(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = copy.deepcopy(unit).to(device)
            divided = copy.deepcopy(unit).to(device)
        except Exception as error:  # noqa: BLE001 - what cannot be copied cannot be tried
            return f"it cannot be copied to be checked ({type(error).__name__}: {error})"
        try:
            expected = _run(whole, leaves, unflatten, device)
        except Exception:  # noqa: BLE001 - it cannot run on made-up values, divided or not
            return ""
        for name, parameter in divided.named_parameters():
            if (spec := local_spec(plan, name)) is not None:
                parameter.data = take_part(parameter.data, spec, axis.size, axis.rank).clone()
        inside, outside = (TensorAxis(axis.size, axis.rank, axis.group, inside=each) for each in (True, False))
        install_unit(divided, plan, inside, outside)
        try:
            found = _run(divided, leaves, unflatten, device)
        except Exception as error:  # noqa: BLE001 - told to the user
            return f"divided, it fails ({type(error).__name__}: {error})"
    return _differences(expected, found, plan, axis)


def _run(unit: nn.Module, leaves: Sequence[Any], unflatten: Unflatten, device: torch.device) -> _Result:
    reseed(0, torch.device("cpu"))
    made = [own_object(leaf, partial(_made_up, device=device)) for leaf in leaves]
    inputs = [leaf for leaf in made if isinstance(leaf, Tensor) and leaf.requires_grad]
    # in-place changes of inputs must not hit leaves
    args, kwargs = unflatten(
        [leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in made]
    )
    with _NoDropout():
        out = wholes(unit(*args, **kwargs))
    outputs = [value for value in tree_tensors(out) if value.is_floating_point()]
    reseed(1, torch.device("cpu"))
    weights = [torch.randn(value.shape, dtype=torch.float64).to(value) for value in outputs]
    if torch.is_grad_enabled() and any(value.requires_grad for value in outputs):
        pairs = [(value, weight) for value, weight in zip(outputs, weights, strict=True) if value.requires_grad]
        torch.autograd.backward([value for value, _ in pairs], [weight for _, weight in pairs])
    gradients = {name: parameter.grad for name, parameter in unit.named_parameters()}
    return _Result([value.detach() for value in outputs], [value.grad for value in inputs], gradients)


def _made_up(leaf: Tensor, device: torch.device) -> Tensor:
    if not isinstance(leaf, FakeTensor) and not leaf.isnan().any():  # NaN: made of what had no values yet
        return leaf.detach().to(device).requires_grad_(leaf.requires_grad)
    if not leaf.is_floating_point():
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return torch.randn(leaf.shape, dtype=torch.float64).to(device, leaf.dtype).requires_grad_(leaf.requires_grad)


def _differences(expected: _Result, found: _Result, plan: UnitPlan, axis: TensorAxis) -> str:
    if [value.shape for value in expected.outputs] != [value.shape for value in found.outputs]:
        return "divided, it returns values of other shapes"
    pairs: list[Pair] = []
    pairs += [(RESULT, a, b) for a, b in zip(expected.outputs, found.outputs, strict=True)]
    pairs += [("the gradient of an input", a, b) for a, b in zip(expected.inputs, found.inputs, strict=True)]
    for name, gradient in expected.parameters.items():
        ours = found.parameters[name]
        if (spec := local_spec(plan, name)) is not None and gradient is not None:
            gradient = take_part(gradient, spec, axis.size, axis.rank)
        if name in plan.partial and gradient is not None:
            ours = axis.all_reduce(torch.zeros_like(gradient) if ours is None else ours)
        pairs.append((f"the gradient of {name!r}", gradient, ours))
    difference = first_difference(pairs, _TOLERANCE)
    return difference and f"divided, {difference}"
