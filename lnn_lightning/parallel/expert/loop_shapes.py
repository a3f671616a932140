"""What a loop over experts returns of values without data: a trace and a trial get through what depends on data.

The block's first run, which needs no expert, is made with made-up values, and all that comes out (results, and what is
left in attributes) is given without data. Where its router is not here (or has no values), results are taken to follow
from the arguments as they did in the first such run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lnn_lightning.parallel.expert.recording import Answer, Recorder, loop_state
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
    """What a block returns, by shape, of fake tensors or those on the meta device; its experts shared out or not.

    Args:
        module: the block.
        forward: its own, which calls some of the experts.
        experts: all of them in order.
        args: of the call.
        kwargs: of the call.
        name: of the block, for people.
    """
    leaves, unflatten = tree_flatten((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    outside = list(modules_outside(module, experts))
    state, here = loop_state(module), are_here(outside)
    local = next((place for place, expert in enumerate(experts) if are_here(expert.modules())), 0)
    own = [each for part in outside for each in part._parameters.values() if each is not None]
    tie = _tie(mode, [*leaves, *own])
    if state.answer is not None and not (here and mode is not None):
        return _as_before(state.answer, mode, leaves, tie)
    recorder, left = Recorder(name, experts, local, state), _Left(outside)
    put_back = generators_as_now(module, experts)
    try:
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), ExitStack() as stack:
            device = torch.device("cpu")
            if here:
                device = next((each.device for each in own), device)
            else:
                stack.enter_context(_made_up_weights(outside))
            stack.enter_context(preserved_rng(device))
            real = [_made_up(leaf, device) for leaf in leaves]
            real_args, real_kwargs = unflatten(real)
            out = recorder.record(module, partial(left.run, forward), real_args, real_kwargs, strict=False)
    except Exception:  # noqa: BLE001 - made-up values do not suit it
        return _as_before(state.answer, mode, leaves, tie)
    finally:
        put_back()
    outputs, build = tree_flatten(out)
    state.answer = Answer(tuple(_relation(each, real) for each in outputs), build)
    with mode or nullcontext(), suppress(Exception):  # for the numbers of operations and of bytes that are saved
        if (given := recorder.calls_given) is not None:
            rows = torch.empty((sum(recorder.rows), given.width), dtype=given.dtype, device=tie.device)
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


def _as_before(answer: Answer | None, mode: FakeTensorMode | None, leaves: Sequence[Any], tie: Tensor) -> Any:
    """Results that follow from the arguments as they did; like the first one, if nothing is known."""
    if answer is None:
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
        return _fake(mode, tie, {}, first)
    made: list[Any] = []
    for each in answer.relations:
        shape = leaves[each.like].shape if each.like is not None else each.shape
        if each.like is None and each.per_token:
            shape = (_tokens(leaves), *shape[1:])
        blank = None if each.dtype is None else torch.empty(shape, dtype=each.dtype, device="meta")
        made.append(each.value if blank is None else _fake(mode, tie, {}, blank))
    return answer.unflatten(made)


def _fake(mode: FakeTensorMode | None, tie: Tensor, known: dict[int, Tensor], value: Any) -> Any:
    """A value without data that follows from the arguments; one of them, if the block has returned it."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    if id(value) in known:
        return known[id(value)]
    with mode or nullcontext():
        made = torch.empty(value.shape, dtype=value.dtype, device=tie.device)
        return made | tie.bool() if value.dtype == torch.bool else made + tie.to(value.dtype)


def _tie(mode: FakeTensorMode | None, values: Sequence[Any]) -> Tensor:
    """A number without data that follows from values."""
    floating = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    like = next(each for each in floating if isinstance(each, FakeTensor) or (mode is None and each.is_meta))
    with mode or nullcontext():
        tie = torch.zeros((), device=like.device)
        for each in floating:
            if isinstance(each, FakeTensor) or (type(each) in (Tensor, nn.Parameter) and each.device == tie.device):
                tie = tie + 0 * each.sum()
    return tie


def are_here(modules: Iterable[nn.Module]) -> bool:
    """Whether modules have their values: not elsewhere, not in parts, not to be made yet."""
    tensors = [each for _, _, each in _tensors(modules)]
    return all(type(each) in (Tensor, nn.Parameter) and not each.is_meta for each in tensors)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in modules:
        for store in (module._parameters, module._buffers):
            for name, tensor in list(store.items()):
                if tensor is not None:
                    yield store, name, tensor


@contextmanager
def _made_up_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules have values inside, on the CPU."""
    saved = list(_tensors(modules))
    try:
        for store, name, tensor in saved:
            made = _values(tensor.shape, tensor.dtype, torch.device("cpu"))
            store[name] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        yield
    finally:
        for store, name, tensor in saved:
            store[name] = tensor


def _made_up(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, FakeTensor) and not (isinstance(leaf, Tensor) and leaf.is_meta):
        return leaf
    return _values(leaf.shape, leaf.dtype, device).requires_grad_(leaf.requires_grad)


def _values(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Some values; no random state is touched."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    numbers = torch.arange(shape.numel(), dtype=torch.float64, device=device)
    return (12.9898 * numbers * numbers).sin().to(dtype).view(shape)
