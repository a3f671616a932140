"""Rules for arithmetic on parts: elementwise operations, products, reductions, normalisations, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lnn_lightning.parallel.step.randomness import forked_as
from lnn_lightning.parallel.tensor.axis import Spec, TensorAxis, reduce
from lnn_lightning.parallel.tensor.randomness import forked_rng
from lnn_lightning.parallel.tensor.sharded import (
    RULES,
    axis_of,
    given,
    is_sharded,
    like,
    operand,
    refused,
    rule,
    spec_of,
    whole_shape,
    writes,
)

T = Tensor
Args = Sequence[Any]
Kwargs = dict[str, Any]

# ------------------------------------------------------------------ elementwise

_ELEMENTWISE = """
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
bool byte cdouble ceil cfloat clamp clamp_max clamp_min clip clone conj copy conj_physical contiguous copysign cos cosh
cpu cuda detach digamma div divide double eq erf erfc erfinv exp exp2 expm1 fill float float_power floor floor_divide
fmax fmin fmod frac ge greater greater_equal gt half heaviside hypot int isclose isfinite isinf isnan le lerp less
less_equal lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit long lt
masked_fill maximum minimum mul multiply nan_to_num ne neg negative not_equal positive pow rad2deg real imag reciprocal
relu remainder round rsqrt sgn short sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh true_divide
trunc where xlogy bfloat16 zero celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish
relu6 selu silu softplus softshrink softsign tanhshrink threshold
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__
__mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__
__or__ __xor__ __rand__ __ror__ __rxor__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__
""".split()
_LIKE = ["zeros_like", "ones_like", "empty_like", "full_like"]
_RANDOM_LIKE = [
    *("rand_like", "randn_like", "bernoulli", "rrelu"),
    *("uniform", "normal", "exponential", "random", "log_normal", "cauchy", "geometric"),
]
_DROPOUTS = [F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, F.feature_alpha_dropout]


def functions(names: Sequence[str]) -> list[Any]:
    """All forms of functions: of torch, of tensors, in place."""
    spaces = (torch, T, F, torch.special, torch._C._nn)
    found = [getattr(space, name, None) for name in names for space in spaces]
    found += [getattr(space, f"{name}_", None) for name in names if not name.endswith("_") for space in spaces]
    return [function for function in found if callable(function)]


def elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The same operation on parts, broadcast: whole operands are cut where they extend along the sharded dimension."""
    if "out" in kwargs or (func is torch.where and len(args) == 1):
        return NotImplemented
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    parts = [value for value in tensors if is_sharded(value)]
    lead = max(parts, key=lambda value: value.ndim)
    if len(tensors) == 1:
        return result_of(func(*args, **kwargs), spec_of(lead), lead)
    spec, axis = spec_of(lead), axis_of(lead)
    from_end = spec.dim - lead.ndim
    for part in parts:
        if part is not lead and (spec_of(part).dim - part.ndim, spec_of(part).sections) != (from_end, spec.sections):
            return refused(func, lead)
    if _is_residual(tensors, spec, from_end):
        return NotImplemented
    in_place = writes(func)

    def local(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_sharded(value):
            return value
        made = operand(value, from_end, spec, axis)
        if made is None:
            raise _DoesNotFit
        return made

    if in_place and not is_sharded(args[0]):
        return NotImplemented
    try:
        args, kwargs = [local(value) for value in args], {key: local(value) for key, value in kwargs.items()}
    except _DoesNotFit:
        return refused(func, lead)
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor):
        return result
    if in_place:
        return args[0]
    return result_of(result, spec.at(result.ndim + from_end), lead)


class _DoesNotFit(Exception):
    pass


def _is_residual(tensors: Sequence[Tensor], spec: Spec, from_end: int) -> bool:
    """Whether features are added to a whole activation: those of the residual stream are wanted whole."""
    return (
        from_end == -1
        and not spec.sequence
        and any(
            not is_sharded(value) and value.requires_grad and not isinstance(value, nn.Parameter) and value.ndim > 1
            and value.shape[-1] == spec.total
            for value in tensors
        )
    )  # fmt: skip


def result_of(result: Any, spec: Spec, lead: Tensor) -> Any:
    """Notes on a result, if it is a tensor, that it is a part."""
    if not isinstance(result, Tensor) or is_sharded(result):
        return result
    return like(result, spec, lead)


@rule(T.to, T.type_as, T.cpu, T.cuda)
def _converted(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if not is_sharded(args[0]):
        return func(*args, **kwargs)  # its own shape stays: the other only tells dtype and device
    return result_of(func(*args, **kwargs), spec_of(args[0]), args[0])


@rule(*functions(_LIKE))
def _made_like(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return result_of(func(*args, **kwargs), spec_of(args[0]), args[0])


@rule(*functions(_RANDOM_LIKE), *_DROPOUTS)
def _random(func: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0] if args else kwargs["input"]
    with forked_as(axis_of(value).rank), forked_rng(value.device, axis_of(value).rank):
        result = func(*args, **kwargs)
    return result_of(result, spec_of(value), value)


for _function in functions(_ELEMENTWISE):
    RULES.setdefault(_function, elementwise)

# ------------------------------------------------------------------ products


def whole_operand(value: Tensor, axis: TensorAxis) -> Tensor:
    """A whole operand that does not extend along the sharded dimension."""
    made = operand(value, -value.ndim - 1, Spec(0, (1,)), axis)
    assert made is not None
    return made


@rule(*functions(["matmul", "__matmul__", "__rmatmul__", "bmm", "mm"]))
def _matmul(func: Any, args: Args, kwargs: Kwargs) -> Any:
    left, right = [*args, *kwargs.values()]
    if func is getattr(T, "__rmatmul__", None):
        left, right = right, left
    if min(left.ndim, right.ndim) < 2:
        return refused(func, left if is_sharded(left) else right)
    lead = left if is_sharded(left) else right
    spec, axis = spec_of(lead), axis_of(lead)
    from_end = spec.dim - lead.ndim
    if is_sharded(left) and is_sharded(right):
        other = spec_of(right)
        other_end = other.dim - right.ndim
        if from_end == other_end and from_end < -2 and other.sections == spec.sections:
            out = torch.matmul(left, right)
            return like(out, spec.at(out.ndim + from_end), lead)
        if (from_end, other_end) == (-1, -2) and other.sections == spec.sections and not spec.padded(axis.size):
            return reduce(torch.matmul(left, right), axis)
        return refused(func, lead)
    whole = right if lead is left else left
    if from_end < -2:
        made = operand(whole, from_end, spec, axis)
    elif from_end == (-2 if lead is left else -1):  # a free dimension: the other is used by every rank
        made = whole_operand(whole, axis)
    else:
        return refused(func, lead)  # contracted
    if made is None:
        return refused(func, lead)
    out = torch.matmul(*((left, made) if lead is left else (made, right)))
    return like(out, spec.at(out.ndim + from_end), lead)


@rule(torch.baddbmm, T.baddbmm)
def _baddbmm(func: Any, args: Args, kwargs: Kwargs) -> Any:
    call = given(("input", "batch1", "batch2"), args, kwargs, beta=1, alpha=1)
    added, left, right = call["input"], call["batch1"], call["batch2"]
    beta, alpha = call["beta"], call["alpha"]
    product = (
        RULES[torch.matmul](torch.matmul, (left, right), {})
        if is_sharded(left) or is_sharded(right)
        else NotImplemented
    )
    if product is NotImplemented or not is_sharded(product):
        return NotImplemented
    product = elementwise(torch.mul, (product, alpha), {})
    return product if beta == 0 else elementwise(torch.add, (product, added), {"alpha": beta})


@rule(torch.einsum)
def _einsum(func: Any, args: Args, kwargs: Kwargs) -> Any:
    equation, *tensors = args
    if not isinstance(equation, str) or "." in equation:
        return NotImplemented
    tensors = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    lead = next(value for value in tensors if is_sharded(value))
    terms, arrow, output = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if not arrow or len(inputs) != len(tensors):
        return NotImplemented
    spec, axis = spec_of(lead), axis_of(lead)
    letter = inputs[next(i for i, value in enumerate(tensors) if value is lead)][spec.dim]
    local = []
    for term, value in zip(inputs, tensors, strict=True):
        if is_sharded(value):
            if term[spec_of(value).dim] != letter or spec_of(value).sections != spec.sections:
                return refused(func, lead)
            local.append(value)
            continue
        made = (
            operand(value, term.index(letter) - value.ndim, spec, axis)
            if letter in term
            else whole_operand(value, axis)
        )
        if made is None:
            return refused(func, lead)
        local.append(made)
    if letter not in output and spec.padded(axis.size):
        return refused(func, lead)
    result = torch.einsum(equation, *local)
    return like(result, spec.at(output.index(letter)), lead) if letter in output else reduce(result, axis)


@rule(F.linear)
def _linear(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A whole weight on a part: right if its features are there; its gradients are partial."""
    call = given(("input", "weight", "bias"), args, kwargs, bias=None)
    value = call["input"]
    if not is_sharded(value) or spec_of(value).dim == value.ndim - 1:
        return refused(func, value) if is_sharded(value) else NotImplemented
    axis = axis_of(value)
    weight = whole_operand(call["weight"], axis)
    bias = None if call["bias"] is None else whole_operand(call["bias"], axis)
    return like(F.linear(value, weight, bias), spec_of(value), value)


# ------------------------------------------------------------------ attention


def _scaled_sections(spec: Spec, total: int) -> tuple[int, ...] | None:
    """Sections of a dimension of another size that goes with a sharded one: as many for each section."""
    if total == 1 or any(section * total % spec.total for section in spec.sections):
        return None
    return tuple(section * total // spec.total for section in spec.sections)


def _scaled(spec: Spec, total: int, size: int) -> Spec | None:
    """The same part of a dimension of another size (fewer heads of keys); one of size 1 is left alone."""
    if total in (1, spec.total):
        return spec
    sections = _scaled_sections(spec, total)
    if sections is None or any(section % size for section in sections):
        return None
    return Spec(spec.dim, sections)


@rule(F.scaled_dot_product_attention)
def _attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call = given(names, args, kwargs)
    lead = next(call[name] for name in names[:3] if is_sharded(call[name]))
    axis, from_end = axis_of(lead), spec_of(lead).dim - lead.ndim
    if from_end > -3:
        return refused(func, lead)
    query = call["query"]
    heads = whole_shape(query)[from_end] if is_sharded(query) else query.shape[from_end]
    spec = spec_of(query) if is_sharded(query) else _scaled(spec_of(lead), heads, axis.size)
    if spec is None:
        return refused(func, lead)
    for name in names[:4]:
        value = call.get(name)
        if value is None:
            continue
        if is_sharded(value):
            own = spec_of(value)
            if own.dim - value.ndim != from_end or own.sections != _scaled_sections(spec, own.total):
                return refused(func, lead)
            continue
        wanted = _scaled(spec, value.shape[from_end], axis.size) if value.ndim >= -from_end else spec
        if wanted is None and name in ("key", "value") and call.get("enable_gqa") and from_end == -3:
            value, wanted = value.repeat_interleave(heads // value.shape[-3], -3), spec
        made = None if wanted is None else operand(value, from_end, wanted, axis)
        if made is None:
            return refused(func, lead)
        call[name] = made
    result_spec = spec.at(query.ndim + from_end)
    if call.get("dropout_p"):
        with forked_as(axis.rank), forked_rng(lead.device, axis.rank):
            return like(func(**call), result_spec, lead)
    return like(func(**call), result_spec, lead)
