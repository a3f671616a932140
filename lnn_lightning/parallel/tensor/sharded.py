"""Activations that know which part of a whole they are.

A :class:`Sharded` tensor is a rank's plain local part with a note of what it is a part of. Code written with global
sizes goes on working: shapes are those of the whole, and each operation has a rule (``rules_*.py``) that does the right
thing on the part. What has no rule gets the whole, gathered: right, only slower. The note travels with the tensor, so
nothing depends on where an operation is called from, a recomputation in the backward included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.tree import tree_tensors
from lnn_lightning.parallel.tensor.axis import Ledger, Spec, TensorAxis, enter, gather, scatter, take_part
from lnn_lightning.parallel.tensor.region import cached, current_region

Rule = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
_SPELLINGS = {"axis": "dim", "keepdims": "keepdim"}
RULES: dict[Any, Rule] = {}
"""Function -> what it does on parts; a rule may return NotImplemented."""


class ShardingError(StepError):
    """An operation on a rank's part that can neither be done there nor on the whole."""

    def __init__(self, message: str, origins: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.origins = origins


class Sharded(Tensor):
    """A rank's part of a whole tensor."""

    _spec: Spec
    _axis: TensorAxis
    _origins: frozenset[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {_SPELLINGS.get(key, key): value for key, value in kwargs.items()} if kwargs else {}
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        rule = RULES.get(func)
        if rule is None and getattr(func, "__name__", "") == "__get__":
            rule = _attribute
        with torch._C.DisableTorchFunctionSubclass():
            if _planning(args, kwargs) is not None:
                return _planned(rule, func, args, kwargs)
            result = _by_rule(rule, func, args, kwargs)
            return _on_wholes(func, args, kwargs) if result is NotImplemented else result


class _FakeSharded(Sharded, FakeTensor):
    """The same without data."""


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for functions."""

    def register(function: Rule) -> Rule:
        for each in functions:
            RULES[each] = function
        return function

    return register


def wrap(part: Tensor, spec: Spec, axis: TensorAxis, origins: frozenset[str] = frozenset()) -> Tensor:
    """Notes on a fresh plain tensor that it is a part; the very object becomes :class:`Sharded`."""
    part.__class__ = _FakeSharded if isinstance(part, FakeTensor) else Sharded
    part._spec, part._axis, part._origins = spec, axis, origins  # type: ignore[attr-defined]
    return part


def like(part: Tensor, spec: Spec, source: Tensor) -> Tensor:
    """As :func:`wrap`, on the axis of another part."""
    return wrap(part, spec, source._axis, source._origins)  # type: ignore[attr-defined]


def is_sharded(value: Any) -> bool:
    """Whether a value is a part."""
    return isinstance(value, Sharded)


def spec_of(value: Tensor) -> Spec:
    """What a part is a part of."""
    return value._spec  # type: ignore[attr-defined]


def axis_of(value: Tensor) -> TensorAxis:
    """The ranks that have the other parts."""
    return value._axis  # type: ignore[attr-defined]


def origins_of(value: Any) -> frozenset[str]:
    """Names of the layers that a part comes from; known while planning."""
    return value._origins


def plain(value: Tensor) -> Tensor:
    """The part itself, as an ordinary tensor."""
    if not is_sharded(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.view(value.shape)


def whole_shape(value: Tensor) -> list[int]:
    """Shape of the whole; call where subclasses are disabled."""
    shape = list(value.shape)
    spec = spec_of(value)
    shape[spec.dim] = spec.total
    return shape


def whole(value: Any) -> Any:
    """The whole of a part, used alike on all ranks; gathered once for each part."""
    if not is_sharded(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        now = None if value.is_inference() else value._version
        version, gathered = value.__dict__.get("_whole", (None, None))
        lacks_graph = (
            gathered is not None and value.requires_grad and torch.is_grad_enabled() and not gathered.requires_grad
        )
        if gathered is None or lacks_graph or now is None or version != now:
            gathered = gather(value, axis_of(value), spec_of(value))
            value.__dict__["_whole"] = (now, gathered)
    return gathered


def wholes(tree: Any) -> Any:
    """A nested structure with wholes in place of parts."""
    return tree_map_only(Sharded, whole, tree)


def operand(value: Tensor, from_end: int, spec: Spec, axis: TensorAxis) -> Tensor | None:
    """A whole operand made fit for an operation on parts; None if its shape does not fit.

    Args:
        value: a whole tensor that is broadcast against parts.
        from_end: the sharded dimension of the parts, counted from the end (negative).
        spec: what the parts are.
        axis: tensor ranks.
    """
    dim = value.ndim + from_end
    is_parameter = axis.inside and isinstance(value, nn.Parameter)
    stays_partial = is_parameter or not value.requires_grad
    if is_parameter and axis.ledger is not None:
        axis.ledger.partial(value)  # also one that does not learn yet
    elif is_parameter and value.requires_grad and not _is_known_partial(value):
        raise ShardingError(
            f"A parameter of shape {tuple(value.shape)} is used on values that are divided over the tensor ranks. No "
            "call of its block did that when the step was traced: it takes another way now (a branch that depends on "
            "data or on a counter). Set `tensor_parallel_plan={'<block>.*': 'replicate'}` for it."
        )
    if dim < 0 or value.shape[dim] == 1:
        return value if stays_partial else cached("enter", value, lambda: enter(value, axis))
    if value.shape[dim] != spec.total:
        return None
    here = spec.at(dim)
    if stays_partial:
        return take_part(value, here, axis.size, axis.rank)
    return cached(("scatter", here), value, lambda: scatter(value, axis, here))


def _is_known_partial(parameter: Tensor) -> bool:
    region = current_region()
    return region is None or region.partial is None or id(parameter) in region.partial


def refused(func: Any, value: Tensor, sections: Sequence[int] | None = None) -> Any:
    """For rules: there is none for this case; tells a planner under which sections there would be."""
    axis = axis_of(value)
    if axis.ledger is not None and sections is not None:
        axis.ledger.gathered(name_of(func), origins_of(value), tuple(sections))
    return NotImplemented


def name_of(func: Any) -> str:
    """A function's name for people."""
    return getattr(func, "__name__", str(func))


def given(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Arguments of a call by name."""
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _attribute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Attributes of a tensor; those that depend on the shape have rules of their own."""
    value, result = args[0], func(*args, **kwargs)
    if not isinstance(result, Tensor):
        return result
    return like(result, spec_of(value), value) if result.shape == value.shape else NotImplemented


def _by_rule(rule: Rule | None, func: Any, args: Any, kwargs: Any) -> Any:
    """What a rule makes of a call; NotImplemented too where the call's arguments are none it knows."""
    if rule is None:
        return NotImplemented
    try:
        return rule(func, args, kwargs)
    except (IndexError, KeyError, TypeError, ValueError):
        return NotImplemented


def _planning(args: Sequence[Any], kwargs: dict[str, Any]) -> Ledger | None:
    for value in args:  # nearly always: this runs for every operation
        if is_sharded(value):
            return axis_of(value).ledger
    return next((axis_of(value).ledger for value in tree_tensors((args, kwargs)) if is_sharded(value)), None)


def _planned(rule: Rule | None, func: Any, args: Any, kwargs: Any) -> Any:
    """As always, with books kept: what a rule did before it gave up does not count."""
    ledger = _planning(args, kwargs)
    assert ledger is not None
    mark = ledger.mark()
    result = _by_rule(rule, func, args, kwargs)
    if result is NotImplemented:
        ledger.take_back(mark)
        return _on_wholes(func, args, kwargs)
    _pass_on_origins(result, args, kwargs)
    return result


def _origins_in(tree: Any) -> frozenset[str]:
    return frozenset().union(*(origins_of(value) for value in tree_tensors(tree) if is_sharded(value)))


def _pass_on_origins(result: Any, *trees: Any) -> None:
    origins = _origins_in(trees)
    for value in tree_tensors(result):
        if is_sharded(value):
            value._origins = origins_of(value) | origins  # type: ignore[attr-defined]


def _on_wholes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    if name in ("__reduce_ex__", "share_memory_"):
        raise _impossible(name, args[0])
    book_wholes(name, args, kwargs)
    if args and is_sharded(args[0]) and writes(func):
        return _write_whole(func, name, args, kwargs)
    args, kwargs = wholes((tuple(args), kwargs))
    return func(*args, **kwargs)


def book_wholes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Tells a planner that something gets wholes in place of these parts."""
    ledger = _planning(args, kwargs)
    if ledger is None:
        return
    ledger.gathered(name, _origins_in((args, kwargs)), None)
    for value in tree_tensors((args, kwargs)):
        if isinstance(value, nn.Parameter):
            ledger.used_on_whole(value)


def _write_whole(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation in place: on the whole, of which each rank takes its part back."""
    value, spec, axis = args[0], spec_of(args[0]), axis_of(args[0])
    written = gather(value, axis, spec)
    rest, kwargs = wholes((tuple(args[1:]), kwargs))
    result = func(written, *rest, **kwargs)
    if list(written.shape) != whole_shape(value):
        raise _impossible(name, value)
    part = scatter(written, axis, spec) if written.requires_grad else take_part(written, spec, axis.size, axis.rank)
    value.copy_(part)
    return value if result is written else result


def _impossible(name: str, value: Tensor) -> ShardingError:
    return ShardingError(
        f"`{name}` on an activation that is divided over the tensor ranks (whole shape {whole_shape(value)}) is not "
        "possible. Give the layers around it another role with `tensor_parallel_plan={'<layer>': 'replicate'}`, or use "
        "an operation that is not in place.",
        origins_of(value),
    )


_IN_PLACE = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)


def writes(func: Any) -> bool:
    """Whether a function changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
