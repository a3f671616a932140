"""What the engine asks of whoever owns the step: silence while it is traced, and memory of what it says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class StepObserver:
    """Does nothing; the Lightning strategy overrides it to catch ``self.log``, metrics and attributes."""

    def recording(self, micro_batch: int) -> AbstractContextManager[Any]:
        """The last stage's run of a micro-batch: what the step says counts."""
        return nullcontext()

    def passing(self, undo: bool) -> AbstractContextManager[Any]:
        """A run of another stage: what the step says is dropped; ``undo`` what it leaves behind, too."""
        return nullcontext()

    def muted(self, on_value: Callable[[Any], None] | None = None) -> AbstractContextManager[Any]:
        """A traced or dry run: what the step says is dropped (shown to ``on_value``), what it leaves behind undone."""
        return nullcontext()
