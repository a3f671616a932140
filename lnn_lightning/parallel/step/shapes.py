"""Blocks whose shapes depend on data: learn what comes out by running them for real once.

Token routing (``nonzero``, indexing with masks) cannot run on fake tensors. Such a unit is run once at setup on made-up
inputs; later its outputs are taken to keep the learnt relation to the shapes of its inputs, which the stage that really
runs it checks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.standin import has_stand_ins
from lnn_lightning.parallel.step.tree import Unflatten, tree_flatten, tree_leaves


@dataclass(frozen=True)
class ShapeRule:
    """How a unit's output leaves follow from its inputs: like tensor input ``n``, or a value that stays the same."""

    leaves: tuple[tuple[str, Any], ...]
    unflatten: Unflatten
    flops: int


def learn_output(
    name: str,
    unit: nn.Module,
    original: Callable[..., Any],
    leaves: list[Any],
    unflatten: Unflatten,
    fake_mode: FakeTensorMode,
    rule: ShapeRule | None,
    error: Exception,
) -> tuple[Any, ShapeRule]:
    """Fake output of a unit that failed on fake inputs, and the rule it follows.

    Raises:
        StepError: the unit fails on real inputs as well, or its output shapes follow no rule we know.
    """
    if rule is None:
        if has_stand_ins(unit) or any(parameter.is_meta for parameter in unit.parameters()):
            rule = _like_first_input(leaves)
        else:
            rule = _run_for_real(name, unit, original, leaves, unflatten, error)
    return _apply(name, rule, leaves, fake_mode), rule


def _run_for_real(
    name: str, unit: nn.Module, original: Callable[..., Any], leaves: list[Any], unflatten: Unflatten, error: Exception
) -> ShapeRule:
    buffers = {key: buffer.clone() for key, buffer in unit.named_buffers()}
    try:
        with unset_fake_temporarily(), torch.no_grad():
            real = [_made_up(leaf) for leaf in leaves]
            args, kwargs = unflatten(real)
            out = original(*args, **kwargs)
            for key, buffer in unit.named_buffers():
                buffer.copy_(buffers[key])
    except Exception as second:
        raise StepError(
            f"The block {name!r} ({type(unit).__name__}) can be followed neither on fake tensors "
            f"({type(error).__name__}: {error}) nor on made-up inputs ({type(second).__name__}: {second}). "
            "Keep it out of the pipeline by naming the blocks around it in `split_points`."
        ) from error
    outputs, build = tree_flatten(out)
    relations = tuple(_relation(name, leaf, real) for leaf in outputs)
    return ShapeRule(relations, build, guess_flops(unit, leaves))


def _made_up(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    if leaf.dtype.is_floating_point:
        return torch.randn(leaf.shape, dtype=torch.float32).to(leaf.dtype).to(leaf.fake_device)
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.fake_device)


def own_object(value: Any, tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """A copy of an argument that is an object with a state (a cache), down to its tensors.

    Args:
        value: the argument.
        tensor: what a tensor becomes; it is kept by default.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return tensor(value)
    if isinstance(value, list):
        return [own_object(item, tensor) for item in value]
    if type(value) is tuple:
        return tuple(own_object(item, tensor) for item in value)
    if type(value) is dict:
        return {key: own_object(item, tensor) for key, item in value.items()}
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return value
    result = copy.copy(value)
    for name, item in vars(result).items():
        result.__dict__[name] = own_object(item, tensor)
    return result


def _relation(name: str, leaf: Any, inputs: list[Any]) -> tuple[str, Any]:
    if not isinstance(leaf, Tensor):
        return ("value", leaf)
    for index, candidate in enumerate(inputs):
        if isinstance(candidate, Tensor) and candidate.shape == leaf.shape and candidate.dtype == leaf.dtype:
            return ("like", index)
    if leaf.dim() == 0:
        return ("scalar", leaf.dtype)
    raise StepError(
        f"The block {name!r} depends on data and returns a tensor of shape {tuple(leaf.shape)} that no input of it "
        "has, so the shape cannot be known before it runs. Let it return tensors shaped like its inputs."
    )


def _like_first_input(leaves: list[Any]) -> ShapeRule:
    first = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return ShapeRule((("like", first),), lambda new: new[0], 0)


def _apply(name: str, rule: ShapeRule, leaves: list[Any], fake_mode: FakeTensorMode) -> Any:
    results: list[Any] = []
    for kind, what in rule.leaves:
        if kind == "value":
            results.append(what)
            continue
        with fake_mode:
            if kind == "scalar":
                made = torch.zeros((), dtype=what)
            else:
                made = torch.empty(leaves[what].shape, dtype=leaves[what].dtype, device=leaves[what].device)
        floating = made.dtype.is_floating_point
        results.append(made.requires_grad_(floating and torch.is_grad_enabled()))
    return rule.unflatten(results)


def guess_flops(unit: nn.Module, leaves: list[Any]) -> int:
    """Two operations a parameter and token, for units whose operators have no formula."""
    tokens = max(
        (leaf.numel() // max(leaf.shape[-1], 1) for leaf in tree_leaves(leaves) if _has_shape(leaf)), default=1
    )
    return 2 * tokens * sum(parameter.numel() for parameter in unit.parameters())


def _has_shape(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
