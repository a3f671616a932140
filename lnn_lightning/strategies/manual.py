"""Manual optimization: one run of the user's step drives the optimizers, others compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lnn_lightning.parallel.errors import StepError


class _IdleOptimizer:
    """Looks like the user's optimizer and does not move."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Runs the closure only."""
        return closure() if closure is not None else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def __iter__(self) -> Iterator[Any]:
        raise StepError(SEVERAL_OPTIMIZERS)

    @contextmanager
    def toggle_model(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Does nothing."""
        yield


SEVERAL_OPTIMIZERS = (
    "Manual optimization with several optimizers cannot be pipelined: their steps would meet blocks on different "
    "stages at different times. Use one optimizer with several parameter groups."
)


class _NotYet:
    """Stands for an optimizer or scheduler while there is none: the step is traced before they are configured."""

    param_groups: list[dict[str, Any]] = [{"lr": 0.0, "params": []}]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


class _IdleScheduler:
    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""


def computing_step(module: pl.LightningModule, step: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    """The user's manual step as one that only computes: it returns the loss given to ``manual_backward``.

    Raises:
        StepError: (from the returned function) ``manual_backward`` was not called once.
    """

    def compute(batch: Any) -> Tensor:
        losses: list[Tensor] = []
        optimizers, schedulers = module.optimizers, module.lr_schedulers

        def idle(found: Any, kind: type) -> Any:
            if isinstance(found, list) and found:
                return [kind(each) for each in found]
            return kind(found or _NotYet())

        with replaced(
            module,
            optimizers=lambda *a, **k: idle(optimizers(*a, **k), _IdleOptimizer),
            lr_schedulers=lambda *a, **k: idle(schedulers(*a, **k), _IdleScheduler),
            manual_backward=lambda loss, *a, **k: losses.append(loss),
            clip_gradients=_nothing,
            toggle_optimizer=_nothing,
            untoggle_optimizer=_nothing,
        ):
            step(batch)
        if len(losses) != 1:
            raise StepError(
                f"training_step called `manual_backward` {len(losses)} times; under a pipeline it must be called "
                f"once a step. Add up the losses and call it once."
            )
        return losses[0]

    return compute


@contextmanager
def replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes on the instance for a while."""
    missing = object()
    before = {name: module.__dict__.get(name, missing) for name in attributes}
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
