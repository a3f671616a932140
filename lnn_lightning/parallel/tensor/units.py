"""A planned unit while it runs: values come in whole (or sharded along their tokens), and go out so."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lnn_lightning.parallel.step.tree import tree_flatten
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, scatter
from lnn_lightning.parallel.tensor.calls import ParameterMode
from lnn_lightning.parallel.tensor.layers import Role
from lnn_lightning.parallel.tensor.modules import Forward, is_suspended, own_forward
from lnn_lightning.parallel.tensor.region import Region, current_region, in_region
from lnn_lightning.parallel.tensor.sharded import is_sharded, plain, spec_of, whole, wholes, wrap


@dataclass(eq=False)
class UnitPlan:
    """How a unit runs; made by the planner.

    Attributes:
        roles: parameter name -> role of the layer it is the weight of.
        transposed: names of weights stored as (in, out).
        biases: name of a bias -> name of the weight it belongs to.
        partial: names of whole parameters whose gradients must be added up over the ranks.
        sequence: dimension of the values between units that stays sharded; None: they are whole.
        argument: name or position of the argument of ``forward`` that is sharded so.
        output: number of the output leaf that is.
        open_outputs: numbers of output leaves whose last dimension may stay sharded (logits).
        bytes: (forward, backward) bytes that each rank sends in one call.
        reasons: parameter name -> why it has its role.
    """

    roles: dict[str, Role] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    biases: dict[str, str] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    sequence: int | None = None
    argument: str | int | None = None
    output: int = 0
    open_outputs: frozenset[int] = frozenset()
    bytes: tuple[int, int] = (0, 0)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class UnitState:
    """A planned unit on this rank's axis."""

    plan: UnitPlan
    axis: TensorAxis
    outside: TensorAxis
    bare: tuple[tuple[nn.Module, str, Role], ...] = ()
    shared: tuple[tuple[nn.Module, str], ...] = ()
    has_attention: bool = False
    buffered: tuple[nn.Module, ...] = ()
    tokens: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitState:
        made = memo[id(self)] = UnitState(self.plan, self.axis, self.outside, has_attention=self.has_attention)
        made.bare, made.shared, made.buffered = copy.deepcopy((self.bare, self.shared, self.buffered), memo)
        return made


def unit_forward(self: Any, before: Forward, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a planned unit."""
    forward = own_forward(self, before)
    if is_suspended() or current_region() is not None:
        return forward(*args, **kwargs)
    return run_unit(self.lnn_unit, forward, args, kwargs)


def planned_forward(unit: nn.Module) -> Callable[..., Any]:
    """What a unit's ``forward`` is but for our running it as a unit."""
    now = vars(unit).get("forward")
    if isinstance(now, partial) and now.func is unit_forward:
        now = now.args[1]
    return own_forward(unit, now)


def run_unit(state: UnitState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a unit in its region: values come in whole (or sharded along tokens), and go out so."""
    plan = state.plan
    if plan.sequence is None:
        (args, kwargs), active = wholes((tuple(args), kwargs)), False
    else:
        args, kwargs, active = _sharded_argument(state, forward, args, kwargs)
    with ExitStack() as stack:
        roles = {id(getattr(owner, name)): role for owner, name, role in state.bare}
        shares = frozenset(id(getattr(owner, name)) for owner, name in state.shared)
        state.tokens = plan.sequence if active else None
        known = None if state.axis.ledger is not None else shares
        stack.enter_context(in_region(Region(plan.sequence if active else None, known)))
        needs_shares = plan.sequence is not None and not active and torch.is_grad_enabled()
        if roles or (shares and needs_shares):
            stack.enter_context(ParameterMode(roles, shares if needs_shares else frozenset(), state.axis))
        if state.has_attention:
            stack.enter_context(_slow_path())
        out = forward(*args, **kwargs)
    for module in state.buffered:
        for name, buffer in module._buffers.items():
            if is_sharded(buffer):  # assigned from a part
                module._buffers[name] = whole(buffer)
    return _outputs(state, out, active)


def _sharded_argument(state: UnitState, forward: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    plan, axis = state.plan, state.axis
    args, kwargs = list(args), dict(kwargs)
    store, key = find_argument(forward, plan.argument, args, kwargs)
    given = store[key]
    spec = sequence_spec(given, plan.sequence, axis.size)
    if spec is None:
        mine = whole(given)
    elif is_sharded(given) and spec_of(given) == spec:
        mine = wrap(plain(given), spec, axis)
    else:
        mine = wrap(scatter(whole(given), axis, spec), spec, axis)
    store[key] = None
    args, kwargs = wholes((tuple(args), kwargs))
    args = list(args)
    if isinstance(key, int):
        args[key] = mine
    else:
        kwargs[key] = mine
    return tuple(args), kwargs, spec is not None


def find_argument(forward: Any, argument: str | int | None, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Where a call has an argument: (args or kwargs, its key there)."""
    if isinstance(argument, int):
        return args, argument
    if argument in kwargs:
        return kwargs, argument
    names = list(inspect.signature(forward).parameters)
    return args, names.index(str(argument))


def _outputs(state: UnitState, out: Any, active: bool) -> Any:
    plan, outside = state.plan, state.outside
    leaves, unflatten = tree_flatten(out)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        spec = sequence_spec(leaf, plan.sequence, outside.size) if active and index == plan.output else None
        if is_sharded(leaf) and (spec_of(leaf) == spec or _stays_open(plan, index, leaf)):
            leaves[index] = wrap(plain(leaf), spec_of(leaf), outside)
        elif spec is not None:
            leaves[index] = wrap(scatter(whole(leaf), outside, spec), spec, outside)
        else:
            leaves[index] = whole(leaf)
    return unflatten(leaves)


def _stays_open(plan: UnitPlan, index: int, leaf: Tensor) -> bool:
    return index in plan.open_outputs and torch.is_grad_enabled() and spec_of(leaf).dim == leaf.ndim - 1


def sequence_spec(value: Any, dim: int | None, size: int) -> Spec | None:
    """How a value between units is divided along its tokens over ``size`` ranks; None if it cannot be.

    Tells by its shape alone.
    """
    if dim is None or len(value.shape) <= dim + 1 or value.shape[dim] % size:
        return None
    return Spec(dim, (value.shape[dim],), sequence=True)


@contextmanager
def _slow_path() -> Iterator[None]:
    """The fused inference path of transformer layers knows nothing of parts."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
