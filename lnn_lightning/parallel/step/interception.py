"""Torch functions that a step must not call from glue, or whose reach must be known, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing

from lnn_lightning.parallel.errors import StepError


class CheckpointRegions:
    """Which unit calls happen inside one ``torch.utils.checkpoint.checkpoint`` of glue code.

    Its backward calls them again, so they must stay on one stage.

    Attributes:
        current: number of the checkpoint that runs; None: none.
        count: how many there have been.
    """

    def __init__(self) -> None:
        self.current: int | None = None
        self.count = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follows checkpoints made inside."""
        generator, reentrant = checkpointing._checkpoint_without_reentrant_generator, checkpointing.CheckpointFunction
        regions = self

        def watched_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
            made = generator(*args, **kwargs)
            next(made)  # what comes before the function
            outer = regions._enter()
            yield
            regions.current = outer
            yield from made  # and behind it

        class WatchedFunction:
            @staticmethod
            def apply(*args: Any, **kwargs: Any) -> Any:
                outer = regions._enter()
                try:
                    return reentrant.apply(*args, **kwargs)
                finally:
                    regions.current = outer

        with (
            replaced(checkpointing, "_checkpoint_without_reentrant_generator", watched_generator),
            replaced(checkpointing, "CheckpointFunction", WatchedFunction),
        ):
            yield

    def _enter(self) -> int | None:
        outer = self.current
        if outer is None:
            self.current = self.count
            self.count += 1
        return outer


@contextmanager
def no_backward() -> Iterator[None]:
    """Refuses derivatives taken inside of a step that is to be cut into stages."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StepError(
            "The step calls `torch.autograd.grad` or `backward` itself (a gradient penalty, say): the graph behind its "
            "values is spread over the pipeline stages. Train without a pipeline (pipeline_parallel_size=1)."
        )

    with replaced(torch.autograd, "grad", refuse), replaced(torch.Tensor, "backward", refuse):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value inside."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
