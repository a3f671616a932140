"""What may be put around the runs of a step: other ways to keep values and parameters, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lnn_lightning.parallel.step.trace import Call

Body = Callable[..., Any]
"""Runs a unit on its arguments, with the random numbers of this call however often it is run."""


@dataclass(frozen=True)
class UnitRun:
    """A unit about to run in a step.

    Attributes:
        stage: number of the stage it runs in.
        index: number of the micro-batch.
        call: the traced call.
        unit: the module.
        hooked: the call runs the unit's hooks (it does not go straight to ``forward``).
    """

    stage: int
    index: int
    call: Call
    unit: nn.Module
    hooked: bool = True


class StepExtension:
    """Changes how the units of a step run and what is kept between forward and backward, never what is computed.

    Does nothing; :mod:`lnn_lightning.memory` has the real ones. The engine calls them in the order of its list, the
    first one outermost.

    Attributes:
        may_split: the backward of inputs and of weights may be made apart (zero bubble).
    """

    may_split = True

    def begin(self, parts: int, training: bool) -> None:
        """Before the first forward of a step of so many micro-batches."""

    def finish(self) -> None:
        """Behind the last backward of a training step or the last forward of another, and after an error."""

    def forward(self, stage: int, index: int) -> AbstractContextManager[Any]:
        """Around a stage's forward of a micro-batch in a training step."""
        return nullcontext()

    def backward(self, stage: int, index: int) -> AbstractContextManager[Any]:
        """Around a stage's backward of a micro-batch; around its weight backward too, where that is made apart."""
        return nullcontext()

    def call(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        """Runs a unit, in training steps and in others (then without gradients)."""
        return body(*args, **kwargs)


def extended(extensions: Sequence[StepExtension], run: UnitRun, body: Body) -> Body:
    """Runs a unit with extensions around it, the first one outermost."""
    for extension in reversed(extensions):
        body = partial(_extended, extension, run, body)
    return body


def _extended(extension: StepExtension, run: UnitRun, body: Body, /, *args: Any, **kwargs: Any) -> Any:
    return extension.call(run, body, args, kwargs)
