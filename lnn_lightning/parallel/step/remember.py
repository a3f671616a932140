"""Decisions made once: where a block runs again in backward, it gets those of its first run back.

Which experts a token goes to is a choice between close numbers. A recomputation that makes it anew may choose
otherwise (another kernel, another order of sums, a router that was balanced in between), and then gradients belong to
experts that never saw the token, and ranks exchange different numbers of rows. So the choice is :func:`remembered`.

Whoever runs something twice says so: ``Decisions.first`` around the first run, ``Decisions.again`` around the others.
:func:`checkpoints_remember` says it for ``torch.utils.checkpoint`` in the user's model. First runs may lie in one
another, and within a second run; a second run stands alone, whatever it was started from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor

from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.step.interception import replaced
from lnn_lightning.parallel.step.randomness import device_random_as_now

Keep = Callable[[Tensor], Callable[[], Tensor]]
"""Keeps a tensor until backward; what it makes gives it back, more than once if asked."""


def remembered(make: Callable[[], Tensor]) -> Tensor:
    """A value that is made once, also where what makes it runs again in backward.

    Args:
        make: makes it; may draw random numbers from torch's global generators. What it makes has no gradient.

    Raises:
        StepError: a second run asks for more values than the first one had.
    """
    decision = _made(make) if _here.source is None else _here.source()
    for decisions in _here.first:
        decisions.add(decision)
    return decision.value


def in_second_run() -> bool:
    """Whether what runs here has run before and runs again in backward: it is not to be counted twice."""
    return _here.source is not None or torch._C._current_graph_task_id() != -1  # whoever runs it again


def checkpoints_are_remembered() -> bool:
    """Whether :func:`checkpoints_remember` is around."""
    return _remembering > 0


class _Decision(NamedTuple):
    value: Tensor
    random: Callable[[], None] | None
    """Puts the random generators into the state behind it, if it drew."""


class _Here(threading.local):  # backward has threads of its own
    def __init__(self) -> None:
        self.source: Callable[[], _Decision] | None = None
        self.first: tuple[Decisions, ...] = ()


_here = _Here()
_remembering = 0


@torch.no_grad()  # what autograd saved here would be missing in the second run
def _made(make: Callable[[], Tensor]) -> _Decision:
    if not _here.first:
        return _Decision(make(), None)
    before = torch.get_rng_state()
    value = make()
    if value.device.type == "cpu":
        drew = not torch.equal(before, torch.get_rng_state())
        return _Decision(value, device_random_as_now(value.device) if drew else None)
    return _Decision(value, device_random_as_now(value.device))  # a few bytes, known to the host


def _as_it_is(tensor: Tensor) -> Callable[[], Tensor]:
    version = tensor._version

    def get() -> Tensor:
        if tensor._version != version:
            raise StepError(
                f"A decision of a block (a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}) was changed in place "
                "behind it, but the block runs again in backward and needs it as it was. Change a clone."
            )
        return tensor

    return get


@dataclass
class Decisions:
    """What the first run of a piece of a step decided.

    Attributes:
        keep: how values are kept.
    """

    keep: Keep = _as_it_is
    _kept: list[tuple[Callable[[], Tensor], Callable[[], None] | None]] = field(default_factory=list)
    _drew_on: set[torch.device] = field(default_factory=set)

    def add(self, decision: _Decision) -> None:
        """Keeps one more."""
        if decision.random is not None:
            self._drew_on.add(decision.value.device)
        self._kept.append((self.keep(decision.value), decision.random))

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first run, or the next part of it."""
        outer = _here.first
        _here.first = (*outer, self)
        try:
            yield
        finally:
            _here.first = outer

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a second run: the values come back in their order."""
        outer = _here.source, _here.first
        kept = iter(self._kept)
        put_back = [device_random_as_now(device) for device in self._drew_on]

        def source() -> _Decision:
            get, random = next(kept, (None, None))
            if get is None:
                raise StepError(
                    f"A block that runs again in backward decides more often than in its first run ({len(self._kept)} "
                    "times; which experts its tokens go to, say): it does not compute the same twice. Leave it out of "
                    "recomputation (`recompute=None`, no gradient checkpointing)."
                )
            if random is not None:
                random()
            return _Decision(get(), random)

        _here.source, _here.first = source, ()
        try:
            yield
        finally:
            _here.source, _here.first = outer
            for each in put_back:
                each()


@contextmanager
def checkpoints_remember() -> Iterator[None]:
    """Functions given to ``torch.utils.checkpoint`` inside decide once; their second runs may be made outside."""
    global _remembering
    generator, reentrant = checkpointing._checkpoint_without_reentrant_generator, checkpointing.CheckpointFunction

    def remembering_generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        decisions = Decisions()

        def again(*args: Any, **kwargs: Any) -> Any:
            with decisions.again():
                return function(*args, **kwargs)

        made = generator(again, *args, **kwargs)
        next(made)  # what comes before the function
        with decisions.first() if torch.is_grad_enabled() else nullcontext():
            try:
                yield
            except BaseException as error:
                made.throw(error)
                raise
        yield from made  # and behind it

    class RememberingFunction:
        @staticmethod
        def apply(function: Any, *args: Any) -> Any:
            decisions = Decisions()
            ran = False

            def either(*args: Any) -> Any:
                nonlocal ran
                with decisions.again() if ran else decisions.first():
                    ran = True
                    return function(*args)

            return reentrant.apply(either, *args)

    with (
        replaced(checkpointing, "_checkpoint_without_reentrant_generator", remembering_generator),
        replaced(checkpointing, "CheckpointFunction", RememberingFunction),
    ):
        _remembering += 1
        try:
            yield
        finally:
            _remembering -= 1
