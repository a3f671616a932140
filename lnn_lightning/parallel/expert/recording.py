"""The first run of a loop over experts: what is called with what is written down, and answered with zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.leftovers import attributes_preserved, modules_outside
from lnn_lightning.parallel.step.patching import patched_calls
from lnn_lightning.parallel.step.randomness import preserved_rng
from lnn_lightning.parallel.step.shapes import own_object
from lnn_lightning.parallel.step.standin import is_stand_in
from lnn_lightning.parallel.step.tree import Unflatten, tree_flatten, tree_tensors


class Unsuited(StepError):
    """A block does with its experts what cannot be recorded and replayed."""


@dataclass(frozen=True)
class Form:
    """How an expert is called.

    Attributes:
        names: of keyword arguments.
        others: arguments besides the tensor, which all calls share.
        place: of the tensor among all of them.
    """

    names: tuple[str, ...] = ()
    others: tuple[Any, ...] = ()
    place: int = 0
    unflatten: Unflatten = field(default=lambda new: ((new[0],), {}), compare=False)

    def call(self, expert: nn.Module, value: Tensor) -> Any:
        """Calls an expert with a tensor."""
        args, kwargs = self.unflatten([*self.others[: self.place], value, *self.others[self.place :]])
        return expert(*args, **kwargs)


class Answer(NamedTuple):
    """How what a block returns follows from its arguments.

    Attributes:
        relations: one for each result.
        unflatten: puts the results in their place.
    """

    relations: tuple[Any, ...]
    unflatten: Unflatten


class Given(NamedTuple):
    """What experts are called with.

    Attributes:
        width: of a token.
        dtype: of it.
        autocast: the dtype that autocast casts to around the calls; None: it is off.
    """

    width: int = 1
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None


@dataclass(eq=False)
class LoopState:
    """What is known of a block from calls before.

    Attributes:
        results: what experts were given -> width and dtype of their results.
        given: by autocast around the block: what experts were given last.
        form: how they were called last.
        writes: by training or not: whether the block writes to its arguments.
        answer: what it returned last of values without data.
    """

    results: dict[Given, tuple[int, torch.dtype]] = field(default_factory=dict)
    given: dict[torch.dtype | None, Given] = field(default_factory=dict)
    form: Form = field(default_factory=Form)
    writes: dict[bool, bool] = field(default_factory=dict)
    answer: Answer | None = None

    def __reduce__(self) -> Any:
        """Copies learn anew."""
        return (LoopState, ())


def loop_state(module: nn.Module) -> LoopState:
    """The state of a block; a fresh one if it has none."""
    return vars(module).setdefault("lnn_loop", LoopState())


class Recorder:
    """Calls of the experts of one block.

    Args:
        name: of the block, for people.
        experts: all of them, those of other ranks by name only.
        local: place of one that is here.
        state: what is known of the block.

    Attributes:
        places: the expert of each call.
        values: what it was called with.
        calls_given: what they have in common; None: there was no call.
        problem: why it cannot be done.
    """

    def __init__(self, name: str, experts: Sequence[nn.Module], local: int, state: LoopState) -> None:
        self.name, self.experts, self.local, self.state = name, experts, local, state
        self.places: list[int] = []
        self.values: list[Tensor] = []
        self.calls_given: Given | None = None
        self.problem: str | None = None
        self._versions: list[int] = []
        self._learning = False

    @property
    def rows(self) -> list[int]:
        """Rows of each call."""
        return [value.numel() // value.shape[-1] for value in self.values]

    def record(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, strict: bool) -> Any:
        """Runs the block, and puts back what it changes, but for the global random states.

        Args:
            module: the block.
            forward: its own.
            args: of the call; what is written to them is written to copies.
            kwargs: likewise.
            strict: look after parts of experts, which must not be called by themselves.
        """
        leaves, unflatten = tree_flatten(own_object((args, kwargs)))
        known = self.state.writes.get(module.training)
        if known is not False:
            leaves = [_copied(leaf) for leaf in leaves]
        before = [version_of(leaf) for leaf in leaves]
        units = dict(self._units(strict))
        with ExitStack() as stack:
            stack.enter_context(attributes_preserved(module, self.experts))
            stack.enter_context(buffers_aside(modules_outside(module, self.experts)))
            stack.enter_context(patched_calls(units, self._enter))
            args, kwargs = unflatten(leaves)
            out = forward(*args, **kwargs)
        writes = before != [version_of(leaf) for leaf in leaves]
        if writes and known is False:
            raise self._unsuited("writes to its arguments in some calls and in others not")
        self.state.writes[module.training] = writes
        if self._versions != [version_of(value) for value in self.values]:
            raise self._unsuited("changes in place what it has called an expert with")
        return out

    def given(self, args: Any, device: torch.device) -> Given:
        """What experts are called with; without a call, what is likely."""
        around = autocast_on(device)
        if self.calls_given is not None:
            self.state.given[around] = self.calls_given
        elif around not in self.state.given:
            like = next((each for each in tree_tensors(args) if each.is_floating_point() and each.dim()), None)
            if like is None:
                raise self._unsuited("has called no expert yet, and has no argument that tells how wide tokens are")
            return Given(like.shape[-1], like.dtype, around)
        return self.state.given[around]

    def result_of(self, given: Given, device: torch.device) -> tuple[int, torch.dtype]:
        """Width and dtype of what an expert makes of a token."""
        if given not in self.state.results:
            row = torch.zeros((1, given.width), dtype=given.dtype, device=device)
            self.state.results[given] = self._learnt(row)
        return self.state.results[given]

    def _units(self, strict: bool) -> Iterator[tuple[str, nn.Module]]:
        for place, expert in enumerate(self.experts):
            yield str(place), expert
            if strict:
                yield from ((f"{place}.{name}", part) for name, part in expert.named_modules() if name)

    def _enter(self, name: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        if self._learning:
            return original(*args, **kwargs)
        number, _, part = name.partition(".")
        if part:
            raise self._unsuited(f"calls {part!r} of an expert by itself")
        value, form = self._parted(args, kwargs)
        given = Given(value.shape[-1], value.dtype, autocast_on(value.device))
        if self.calls_given is None:
            self.calls_given, self.state.form = given, form
        elif form != self.state.form:
            raise self._unsuited("calls its experts with different arguments besides the tokens")
        elif given != self.calls_given:
            raise self._unsuited("calls its experts with tokens of different widths or dtypes")
        self.places.append(int(number))
        self.values.append(value)
        self._versions.append(version_of(value))
        width, dtype = self.result_of(given, value.device)
        return value.new_zeros((*value.shape[:-1], width), dtype=dtype)

    def _parted(self, args: Any, kwargs: Any) -> tuple[Tensor, Form]:
        leaves, unflatten = tree_flatten((args, kwargs))
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(tensors) != 1:
            raise self._unsuited(f"calls an expert with {len(tensors)} tensors, not with one")
        (place,) = tensors
        value = leaves.pop(place)
        if not value.dim() or not value.shape[-1] or not value.is_floating_point():
            raise self._unsuited(f"calls an expert with a tensor of shape {list(value.shape)} and {value.dtype}")
        return value, Form(tuple(kwargs), tuple(leaves), place, unflatten)

    def _learnt(self, row: Tensor) -> tuple[int, torch.dtype]:
        expert = self.experts[self.local]
        cache = torch.is_autocast_cache_enabled()
        self._learning = True
        torch.set_autocast_cache_enabled(False)  # it would keep weights without a graph
        try:
            with (
                torch.no_grad(),
                preserved_rng(row.device),
                attributes_preserved(expert),
                buffers_aside(expert.modules()),
            ):
                weight = next(expert.parameters(), row)
                out = self.state.form.call(expert, row.to("meta") if weight.is_meta else row)
        except Exception as error:
            raise self._unsuited(f"has experts that cannot be called with rows ({error})") from error
        finally:
            torch.set_autocast_cache_enabled(cache)
            self._learning = False
        if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != 1 or not out.is_floating_point():
            raise self._unsuited("has experts that do not return one row for one row")
        return out.shape[1], out.dtype

    def _unsuited(self, what: str) -> Unsuited:
        self.problem = f"{self.name!r} {what}"  # the block may catch the error
        return Unsuited(self.problem)


@contextmanager
def buffers_aside(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules have copies of their buffers inside; the buffers and their values stay."""
    saved = [(module, dict(module._buffers)) for module in modules if module._buffers]
    for module, buffers in saved:
        for name, buffer in buffers.items():
            if buffer is not None and not is_stand_in(buffer):
                module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, buffers in saved:
            module._buffers.clear()
            module._buffers.update(buffers)


def version_of(value: Any) -> int:
    """Changes with every write to a tensor."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else leaf


def autocast_on(device: torch.device) -> torch.dtype | None:
    """What autocast casts to; None: it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
