"""How sharded layers and units take the place of the user's: by their class, so that names, state and copies stay.

A linear layer or unit gets a subclass of its own class; parameters used by bare functions (``F.linear(x,
self.weight)``) are recognised by a mode that is on while their unit runs.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lnn_lightning.parallel.step.tree import tree_flatten
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, scatter
from lnn_lightning.parallel.tensor.layers import Role, run_embedding, run_linear
from lnn_lightning.parallel.tensor.multihead import Sections, expanded_forward, project_with
from lnn_lightning.parallel.tensor.region import Region, current_region, in_region
from lnn_lightning.parallel.tensor.sharded import is_sharded, plain, spec_of, whole, wholes, wrap

_state = threading.local()


@contextmanager
def sharding_suspended() -> Iterator[None]:
    """Sharded modules do inside what they did before they were sharded (with whole parameters put in their place)."""
    before = getattr(_state, "suspended", False)
    _state.suspended = True
    try:
        yield
    finally:
        _state.suspended = before


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None


@cache
def _subclass(base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    made = type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__})
    type.__setattr__(made, "forward", forward)  # behind what `__init_subclass__` of the base does to forwards
    return made


def take_class(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives a module another ``forward``; ``original_forward`` finds its own."""
    module.__class__ = _subclass(type(module), forward)  # type: ignore[arg-type]


def give_back_class(module: nn.Module) -> None:
    """Undoes :func:`take_class`."""
    module.__class__ = type(module).__bases__[0]


def original_forward(module: nn.Module, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` that a module had before it got ``ours``."""
    kinds = type(module).__mro__
    at = next(index for index, kind in enumerate(kinds) if vars(kind).get("forward") is ours)
    return getattr(super(kinds[at], module), "forward")  # noqa: B009 - of the class behind it


@dataclass(frozen=True)
class LayerRole:
    """A layer's role on the axis of its unit."""

    role: Role
    axis: TensorAxis


def linear_forward(self: Any, input: Tensor) -> Tensor:
    """``forward`` of a sharded ``nn.Linear`` or ``Conv1D``."""
    if getattr(_state, "suspended", False):
        return original_forward(self, linear_forward)(input)
    layer: LayerRole = self.lnn_layer
    return run_linear(input, self.weight, self.bias, layer.role, layer.axis, transposed=is_conv1d(self))


def multihead_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a sharded ``nn.MultiheadAttention``: in operations that have rules."""
    if getattr(_state, "suspended", False):
        return original_forward(self, multihead_forward)(*args, **kwargs)
    return expanded_forward(self, *args, project=partial(_project, self), **kwargs)


def _project(module: nn.MultiheadAttention, value: Tensor, which: Sections) -> Tensor:
    if not module._qkv_same_embed_dim:
        return project_with(module, value, which)
    return section_linear(value, module.in_proj_weight, module.in_proj_bias, "qkv".index(which), len(which))


def section_linear(value: Tensor, weight: Tensor, bias: Tensor | None, first: int, count: int) -> Tensor:
    """A linear layer with some of the three sections of a fused weight.

    Args:
        value: shape (..., in).
        weight: shape (3 * out, in).
        bias: shape (3 * out,).
        first: number of the first section.
        count: how many.

    Returns:
        Shape (..., count * out).
    """
    if has_torch_function((value, weight)):
        return handle_torch_function(section_linear, (value, weight), value, weight, bias, first, count)
    width = weight.shape[0] // 3
    rows = slice(first * width, (first + count) * width)
    return F.linear(value, weight[rows], None if bias is None else bias[rows])


def conv1d_forward(self: Any, x: Tensor) -> Tensor:
    """``forward`` of a ``Conv1D`` without flattening its input."""
    if getattr(_state, "suspended", False):
        return original_forward(self, conv1d_forward)(x)
    return torch.matmul(x, self.weight) + self.bias


class ParameterMode(TorchFunctionMode):
    """Recognises layers by the parameter that a function is called with.

    Args:
        roles: ``id(parameter)`` -> role.
        shares: ``id(parameter)`` of whole parameters whose gradients are added up over the ranks: where they are used
            on wholes, each rank's gradient is counted as a share.
        axis: tensor ranks.
    """

    def __init__(self, roles: Mapping[int, Role], shares: frozenset[int], axis: TensorAxis) -> None:
        super().__init__()
        self._roles, self._shares, self._axis = roles, shares, axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        layer = linear_call(func, args, kwargs) or embedding_call(func, args, kwargs)
        if layer is not None and (role := self._roles.get(id(layer.weight))) is not None:
            return layer.run(layer.weight, layer.bias, role, self._axis)
        if self._shares and not any(is_sharded(value) for value in _tensors(args, kwargs)):
            args, kwargs = self._shared(args), {key: self._shared(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _shared(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._shared(each) for each in value)
        return _Share.apply(value, self._axis.size) if id(value) in self._shares else value


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, size: int) -> Tensor:
        ctx.size = size
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None


def _tensors(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


@dataclass(frozen=True)
class LayerCall:
    """A function called as a layer, with a bare parameter.

    Attributes:
        weight: its weight.
        bias: its bias; None if it has none.
        transposed: the weight is stored as (in, out).
        value: its input.
        options: those of an embedding; None for a linear layer.
        thirds: (first, count) of the weight's three sections that are used; None: all of a plain weight.
    """

    weight: Any
    bias: Any
    transposed: bool
    value: Any
    options: Sequence[Any] | None = None
    thirds: tuple[int, int] | None = None

    def run(
        self, weight: Tensor, bias: Tensor | None, role: Role, axis: TensorAxis, origins: Any = frozenset()
    ) -> Tensor:
        """The layer in a role, with a rank's parts."""
        if self.options is not None:
            return run_embedding(self.value, weight, self.options, role, axis)
        if self.thirds is not None:
            first, count = self.thirds
            width = weight.shape[0] // 3
            weight = weight.narrow(0, first * width, count * width)
            bias = None if bias is None else bias.narrow(0, first * width, count * width)
            role = Role(role.kind, role.sections[first : first + count])
        return run_linear(self.value, weight, bias, role, axis, self.transposed, origins)


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def linear_call(func: Any, args: Any, kwargs: Any) -> LayerCall | None:
    """A call of a linear function with a two-dimensional parameter."""
    if func is F.linear:
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
        call = LayerCall(given["weight"], given.get("bias"), False, given["input"])
    elif func is section_linear:
        call = LayerCall(args[1], args[2], False, args[0], thirds=(args[3], args[4]))
    elif func in (torch.addmm, Tensor.addmm) and len(args) == 3 and not kwargs:
        call = LayerCall(args[2], args[0], True, args[1])
    elif func in _MATMULS and len(args) == 2 and not kwargs:
        call = LayerCall(args[1], None, True, args[0])
    else:
        return None
    usable = isinstance(call.weight, nn.Parameter) and call.weight.ndim == 2 and isinstance(call.value, Tensor)
    return (
        call if usable and call.value.ndim > 1 and (call.bias is None or isinstance(call.bias, nn.Parameter)) else None
    )


def embedding_call(func: Any, args: Any, kwargs: Any) -> LayerCall | None:
    """A call of an embedding with a parameter."""
    if func is not F.embedding:
        return None
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    defaults = {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    if not isinstance(given["weight"], nn.Parameter):
        return None
    return LayerCall(given["weight"], None, False, given["input"], [given[name] for name in names[2:]])


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

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitState:
        return UnitState(
            self.plan,
            self.axis,
            self.outside,
            copy.deepcopy(self.bare, memo),
            copy.deepcopy(self.shared, memo),
            self.has_attention,
        )


def unit_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a planned unit."""
    forward = original_forward(self, unit_forward)
    if getattr(_state, "suspended", False) or current_region() is not None:
        return forward(*args, **kwargs)
    return run_unit(self.lnn_unit, forward, args, kwargs)


def run_unit(state: UnitState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a unit in its region: values come in whole (or sharded along tokens), and go out so."""
    plan = state.plan
    if plan.sequence is None:
        (args, kwargs), active = wholes((tuple(args), kwargs)), False
    else:
        args, kwargs, active = _sharded_argument(state, forward, args, kwargs)
    with ExitStack() as stack:
        stack.enter_context(in_region(Region(plan.sequence if active else None)))
        roles = {id(getattr(owner, name)): role for owner, name, role in state.bare}
        shares = frozenset(id(getattr(owner, name)) for owner, name in state.shared)
        needs_shares = plan.sequence is not None and not active and torch.is_grad_enabled()
        if roles or (shares and needs_shares):
            stack.enter_context(ParameterMode(roles, shares if needs_shares else frozenset(), state.axis))
        if state.has_attention:
            stack.enter_context(_slow_path())
        out = forward(*args, **kwargs)
    return _outputs(state, out, active)


def _sharded_argument(state: UnitState, forward: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    plan, axis = state.plan, state.axis
    assert plan.sequence is not None
    args, kwargs = list(args), dict(kwargs)
    store, key = find_argument(forward, plan.argument, args, kwargs)
    given = store[key]
    dim = plan.sequence
    spec = Spec(dim, (given.shape[dim],), sequence=True)
    active = given.shape[dim] % axis.size == 0
    if active and is_sharded(given) and spec_of(given) == spec:
        mine = wrap(plain(given), spec, axis)
    else:
        mine = whole(given)
        if active:
            mine = wrap(scatter(mine, axis, spec), spec, axis)
    store[key] = None
    args, kwargs = wholes((tuple(args), kwargs))
    args = list(args)
    if isinstance(key, int):
        args[key] = mine
    else:
        kwargs[key] = mine
    return tuple(args), kwargs, active


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
        sequence = active and index == plan.output
        if not is_sharded(leaf):
            if (
                sequence
                and isinstance(leaf, Tensor)
                and (spec := sequence_spec(leaf, plan.sequence, outside)) is not None
            ):
                leaves[index] = wrap(scatter(leaf, outside, spec), spec, outside)
            continue
        spec = spec_of(leaf)
        stays = sequence and spec.sequence and spec.dim == plan.sequence and len(spec.sections) == 1
        opened = index in plan.open_outputs and torch.is_grad_enabled() and spec.dim == leaf.ndim - 1
        if stays or opened:
            leaves[index] = wrap(plain(leaf), spec, outside)
        elif sequence and (spec := sequence_spec(leaf, plan.sequence, outside)) is not None:
            leaves[index] = wrap(scatter(whole(leaf), outside, spec), spec, outside)
        else:
            leaves[index] = whole(leaf)
    return unflatten(leaves)


def sequence_spec(value: Any, dim: int | None, axis: TensorAxis) -> Spec | None:
    """How a value between units is sharded along its tokens; None if it cannot be. Tells by its shape alone."""
    if dim is None or len(value.shape) <= dim + 1 or value.shape[dim] % axis.size:
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
