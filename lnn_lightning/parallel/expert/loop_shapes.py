"""What a loop over experts returns of fake tensors: a trace gets through a block whose shapes inside depend on data.

The block's first run, which needs no expert, is made with made-up values, and all that comes out (results, and what is
left in attributes) is given as fake tensors of the same shapes. Where its router is not here, results are taken to
follow from the arguments as they did before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lnn_lightning.parallel.expert.recording import Answer, LoopState, Recorder, loop_state
from lnn_lightning.parallel.step.leftovers import attributes_of, modules_outside
from lnn_lightning.parallel.step.randomness import generators_as_now, preserved_rng
from lnn_lightning.parallel.step.tree import tree_flatten, tree_map


def loop_without_data(
    module: nn.Module,
    forward: Callable[..., Any],
    experts: Sequence[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
) -> Any:
    """What a block returns, by shape, of fake tensors; whether its experts are shared out or not.

    Args:
        module: the block.
        forward: its own, which calls some of the experts.
        experts: all of them in order; one of them must be here.
        args: of the call.
        kwargs: of the call.
        name: of the block, for people.
    """
    leaves, unflatten = tree_flatten((args, kwargs))
    mode = next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
    outside = list(modules_outside(module, experts))
    local = next((place for place, expert in enumerate(experts) if _are_here(expert.modules())), None)
    state = loop_state(module)
    own = [each for part in outside for each in part._parameters.values() if each is not None]
    tie = _tie(mode, [*leaves, *own])
    if local is None or not _are_here(outside):
        return _as_before(state, mode, leaves, tie)
    with unset_fake_temporarily():
        real = [_made_up(leaf) for leaf in leaves]
    device = next(leaf.device for leaf in real if isinstance(leaf, Tensor))
    recorder = Recorder(name, experts, local, state)
    put_back = generators_as_now(module, experts)
    left = _Left(outside)
    try:
        with unset_fake_temporarily(), preserved_rng(device):
            real_args, real_kwargs = unflatten(real)
            out = recorder.record(module, partial(left.run, forward), real_args, real_kwargs, strict=False)
    except Exception:  # noqa: BLE001 - made-up values do not suit it
        return _as_before(state, mode, leaves, tie)
    finally:
        put_back()
    outputs, build = tree_flatten(out)
    state.answer = Answer(tuple(_relation(each, real) for each in outputs), build)
    with mode, suppress(Exception):  # for the numbers of operations and of bytes that are saved
        if (given := recorder.calls_given) is not None:
            rows = torch.empty((sum(recorder.rows), given.width), dtype=given.dtype, device=device)
            made = state.form.call(experts[local], rows + tie.to(given.dtype))
            tie = tie + 0 * made.sum().to(tie.dtype)
    known = {id(one): other for one, other in zip(real, leaves, strict=True) if isinstance(other, Tensor)}
    fake = partial(_fake, mode, tie, known)
    left.give(fake)
    return tree_map(fake, out)


class _Left:
    """What a run leaves in attributes of modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.found: list[tuple[nn.Module, str, Any]] = []

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block and notes it."""
        before = [attributes_of(module) for module in self.modules]
        out = forward(*args, **kwargs)
        for module, known in zip(self.modules, before, strict=True):
            for name, (value, items) in attributes_of(module).items():
                old, old_items = known.get(name, (None, None))
                if value is not old or (items is not None and len(items) != len(old_items)):
                    self.found.append((module, name, items if items is not None else value))
        return out

    def give(self, fake: Callable[[Any], Any]) -> None:
        """Puts it into the modules again, without data."""
        for module, name, value in self.found:
            made, now = tree_map(fake, value), vars(module).get(name)
            if isinstance(made, list) and isinstance(now, list):
                now[:] = made
            elif isinstance(made, dict) and isinstance(now, dict):
                now.update(made)
            elif any(isinstance(leaf, Tensor) for leaf in tree_flatten(made)[0]):
                vars(module)[name] = made


@dataclass(frozen=True)
class _Relation:
    """How a result follows from the arguments: like one of them, a row for each token, or by itself.

    Attributes:
        value: a result that is no tensor.
        like: the argument that has its shape.
        per_token: its first dimension is as long as there are tokens.
        shape: its shape.
        dtype: its dtype; None: it is no tensor.
    """

    value: Any
    like: int | None = None
    per_token: bool = False
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


def _relation(result: Any, leaves: Sequence[Any]) -> _Relation:
    if not isinstance(result, Tensor):
        return _Relation(result)
    like = next((n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.shape == result.shape), None)
    per_token = result.dim() > 0 and result.shape[0] == _tokens(leaves)
    return _Relation(None, like, per_token, tuple(result.shape), result.dtype)


def _tokens(leaves: Sequence[Any]) -> int:
    wide = next((each for each in leaves if isinstance(each, Tensor) and each.dim() and each.is_floating_point()), None)
    return 0 if wide is None else wide.shape[:-1].numel()


def _as_before(state: LoopState, mode: FakeTensorMode, leaves: Sequence[Any], tie: Tensor) -> Any:
    """Results that follow from the arguments as they did; like the first one, if nothing is known."""
    if state.answer is None:
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
        return _fake(mode, tie, {}, first)
    made: list[Any] = []
    for each in state.answer.relations:
        shape = leaves[each.like].shape if each.like is not None else each.shape
        if each.like is None and each.per_token:
            shape = (_tokens(leaves), *shape[1:])
        if each.dtype is not None:
            with mode:
                made.append(_fake(mode, tie, {}, torch.empty(shape, dtype=each.dtype, device=tie.device)))
        else:
            made.append(each.value)
    return state.answer.unflatten(made)


def _fake(mode: FakeTensorMode, tie: Tensor, known: dict[int, Tensor], value: Any) -> Any:
    """A value without data that follows from the arguments; one of them, if the block has returned it."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    if id(value) in known:
        return known[id(value)]
    with mode:
        made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return made | tie.bool() if value.dtype == torch.bool else made + tie.to(value.dtype)


def _tie(mode: FakeTensorMode, values: Sequence[Any]) -> Tensor:
    """A number that follows from values."""
    with mode:
        tie: Any = 0.0
        for value in values:
            plain = type(value) in (Tensor, nn.Parameter) and not value.is_meta
            if (plain or isinstance(value, FakeTensor)) and value.is_floating_point():
                tie = tie + value.sum() * 0
        return torch.as_tensor(tie)


def _are_here(modules: Any) -> bool:
    """Whether modules have their values: not elsewhere, not in parts, not to be made yet."""
    stores = [store for module in modules for store in (module._parameters, module._buffers)]
    tensors = [each for store in stores for each in store.values() if each is not None]
    return all(type(each) in (Tensor, nn.Parameter) and not each.is_meta for each in tensors)


def _made_up(leaf: Any) -> Any:
    """Values of a fake tensor, no random state is touched."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    shape, device = leaf.shape, leaf.fake_device
    if not leaf.dtype.is_floating_point:
        return torch.zeros(shape, dtype=leaf.dtype, device=device)
    numbers = torch.arange(shape.numel(), dtype=torch.float64, device=device)
    made = (12.9898 * numbers * numbers).sin().to(leaf.dtype).view(shape)
    return made.requires_grad_(leaf.requires_grad)
