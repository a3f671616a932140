"""Functions called as layers: which parameter is the weight, and what the layer does in a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lnn_lightning.parallel.step.tree import tree_tensors
from lnn_lightning.parallel.tensor.axis import TensorAxis
from lnn_lightning.parallel.tensor.layers import Role, run_embedding, run_linear
from lnn_lightning.parallel.tensor.rules_math import whole_operand
from lnn_lightning.parallel.tensor.sharded import axis_of, given, is_sharded, like, refused, rule, spec_of


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


def transposed_linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer with a weight of shape (in, out), for inputs of any number of dimensions."""
    if has_torch_function((value, weight)):
        return handle_torch_function(transposed_linear, (value, weight), value, weight, bias)
    out = torch.matmul(value, weight)
    return out if bias is None else out + bias


@rule(transposed_linear, section_linear)
def _whole_weight(func: Any, args: Any, kwargs: Any) -> Any:
    """A whole weight on a part, if the part has all features; its gradients are partial."""
    value, weight, bias, *rows = args
    if spec_of(value).dim == value.ndim - 1:
        return refused(func, value)
    axis = axis_of(value)
    weight = whole_operand(weight, axis)
    bias = None if bias is None else whole_operand(bias, axis)
    return like(func(value, weight, bias, *rows), spec_of(value), value)


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
_TURNS = (Tensor.T.__get__, Tensor.mT.__get__, Tensor.t, torch.t)  # type: ignore[attr-defined]


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function; a turned weight remembers which parameter it is (for ``x @ self.weight.T``)."""
    result = func(*args, **kwargs)
    if (parameter := turned_parameter(func, args)) is not None:
        result._lnn_turned = parameter
    return result


def turned_parameter(func: Any, args: Any) -> nn.Parameter | None:
    """The two-dimensional parameter that a call only transposes."""
    turns = func in _TURNS or (
        func in (Tensor.transpose, torch.transpose) and len(args) == 3 and {args[1] % 2, args[2] % 2} == {0, 1}
    )
    return args[0] if turns and args and isinstance(args[0], nn.Parameter) and args[0].ndim == 2 else None


def linear_call(func: Any, args: Any, kwargs: Any) -> LayerCall | None:
    """A call of a linear function with a two-dimensional parameter."""
    if func is F.linear:
        named = given(("input", "weight", "bias"), args, kwargs, bias=None)
        call = LayerCall(named["weight"], named["bias"], False, named["input"])
    elif func is section_linear:
        call = LayerCall(args[1], args[2], False, args[0], thirds=(args[3], args[4]))
    elif func is transposed_linear:
        call = LayerCall(args[1], args[2], True, args[0])
    elif func in (torch.addmm, Tensor.addmm) and len(args) == 3 and not kwargs:
        call = LayerCall(args[2], args[0], True, args[1])
    elif func in _MATMULS and len(args) == 2 and not kwargs:
        turned = getattr(args[1], "_lnn_turned", None)
        call = LayerCall(args[1], None, True, args[0]) if turned is None else LayerCall(turned, None, False, args[0])
    else:
        return None
    weight, bias, value = call.weight, call.bias, call.value
    usable = isinstance(weight, nn.Parameter) and weight.ndim == 2 and isinstance(value, Tensor) and value.ndim > 1
    return call if usable and (bias is None or isinstance(bias, nn.Parameter)) else None


def embedding_call(func: Any, args: Any, kwargs: Any) -> LayerCall | None:
    """A call of an embedding with a parameter."""
    if func is not F.embedding:
        return None
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    defaults = {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
    named = given(names, args, kwargs, **defaults)
    if not isinstance(named["weight"], nn.Parameter):
        return None
    return LayerCall(named["weight"], None, False, named["input"], [named[name] for name in names[2:]])


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
        if self._shares and not any(map(is_sharded, tree_tensors((args, kwargs)))):
            args, kwargs = self._shared(args), {key: self._shared(value) for key, value in kwargs.items()}
        return called(func, args, kwargs)

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
