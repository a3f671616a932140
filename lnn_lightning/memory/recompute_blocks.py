"""Blocks that run again in backward: of what autograd saves within them nothing is kept but what they were given.

Chen et al. 2016 (arXiv 1604.06174). One or several blocks in a row are a *segment*: the first tensor that backward asks
for makes all its blocks run once more, up to the last tensor that is needed. The tensors that are saved on the way are
those of the first run, in the same order, and each goes to the node that asks for it.

``torch.utils.checkpoint`` does the same for one function; here what is recomputed need not be one call of a function,
runs with the buffers and random numbers of before, and what is kept passes through the saved-tensor hooks around, so
that it can be counted, compressed and moved out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from lnn_lightning.memory.recompute_state import Before
from lnn_lightning.memory.saving import Kept, device_of, hooks_around, saving_with
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.extension import Body, UnitRun
from lnn_lightning.parallel.step.hooks import hooks_set_aside, run_pre_hooks
from lnn_lightning.parallel.step.remember import Decisions
from lnn_lightning.parallel.step.saved import watching_saved
from lnn_lightning.parallel.step.shapes import own_object
from lnn_lightning.parallel.step.tree import Unflatten, tree_flatten, tree_leaves


class _Enough(BaseException):
    """Ends a recomputation behind the last tensor that is needed; not an Exception, so that no block catches it."""


class _Place:
    """Stands in a node of the graph for a tensor it saved."""

    __slots__ = ("__weakref__", "kind", "segment")

    def __init__(self, segment: Segment, tensor: Tensor) -> None:
        self.segment, self.kind = segment, _kind(tensor)


@dataclass(frozen=True)
class _Output:
    """An argument that is a result of the block before, by its place among the leaves."""

    leaf: int


@dataclass(frozen=True)
class _Run:
    name: str
    body: Body
    leaves: list[Any]
    unflatten: Unflatten
    before: Before


class Segment:
    """Consecutive blocks that are recomputed together."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._last: dict[int, tuple[ref[Tensor], int]] = {}
        self._places: list[ref[_Place]] = []
        self._values: WeakKeyDictionary[_Place, Tensor] = WeakKeyDictionary()
        hooks = hooks_around()
        self._decisions = Decisions(lambda tensor: Kept(tensor, hooks).get)

    def __len__(self) -> int:
        return len(self._runs)

    def continues(self, args: Any, kwargs: Any) -> bool:
        """Whether a block with these arguments takes up a result of the last block."""
        return any(self._leaf_of(leaf) is not None for leaf in tree_leaves((args, kwargs)))

    def run(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        """Runs a block as the next of the segment."""
        if run.hooked:
            args, kwargs = run_pre_hooks(run.unit, args, kwargs)  # outside, so that they run once
        leaves, unflatten = tree_flatten((args, kwargs))
        before = Before(
            run, device_of([*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *run.unit.parameters()])
        )
        keep = partial(Kept, hooks=hooks_around())
        # objects, a cache say, are to be found as they were
        kept = [self._kept(leaf, keep) if isinstance(leaf, Tensor) else own_object(leaf) for leaf in leaves]
        self._runs.append(_Run(run.call.unit, body, kept, unflatten, before))
        deciding = self._decisions.first()
        with saving_with((self._pack, _unpack)), hooks_set_aside(run.unit, "_forward_pre_hooks"), deciding:
            out = body(*args, **kwargs)
        before.settle()
        outputs = [(index, leaf) for index, leaf in enumerate(tree_leaves(out)) if isinstance(leaf, Tensor)]
        self._last = {index: (ref(leaf), leaf._version) for index, leaf in outputs}
        return out

    def _kept(self, leaf: Tensor, keep: Callable[[Tensor], Kept]) -> Any:
        return keep(leaf) if (place := self._leaf_of(leaf)) is None else _Output(place)

    def _leaf_of(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        found = (i for i, (last, version) in self._last.items() if last() is value and value._version == version)
        return next(found, None)

    def _pack(self, tensor: Tensor) -> _Place:
        place = _Place(self, tensor)
        self._places.append(ref(place))
        return place

    def take(self, place: _Place) -> Tensor:
        """The tensor that belongs to a place; what is not asked for again is not held any longer."""
        if place not in self._values:
            self._recompute()
        return self._values.pop(place)

    def _recompute(self) -> None:
        count = 0

        def note(tensor: Tensor) -> None:
            nonlocal count
            place = self._places[count]() if count < len(self._places) else None
            count += 1
            if place is not None:
                if place.kind != _kind(tensor):
                    raise StepError(f"{self._differs()} {_kind(tensor)}, where it was {place.kind}. {_DIFFERS}")
                self._values[place] = tensor.detach()
            if count >= len(self._places):
                raise _Enough

        try:
            with torch.enable_grad(), watching_saved(note), self._decisions.again():
                self._run_again()
        except _Enough:
            return
        raise StepError(f"{self._differs()} {count} tensors, where it was {len(self._places)}. {_DIFFERS}")

    def _run_again(self) -> None:
        out: list[Any] = []
        for run in self._runs:
            args, kwargs = run.unflatten([_again(leaf, out) for leaf in run.leaves])
            with run.before.again():
                out = tree_leaves(run.body(*args, **kwargs))

    def _differs(self) -> str:
        names = ", ".join(repr(run.name) for run in self._runs)
        return f"Recomputing {names} (`recompute`), what is saved for backward is"


_DIFFERS = (
    "The block does not compute the same twice: it depends on something that changes between forward and backward "
    "other than its arguments, buffers and the global random generators. Leave it out with `recompute=None`."
)


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _unpack(place: _Place) -> Tensor:
    return place.segment.take(place)


def _again(leaf: Any, out: list[Any]) -> Any:
    if isinstance(leaf, _Output):
        return out[leaf.leaf]
    return leaf.get() if isinstance(leaf, Kept) else own_object(leaf)
