"""Saving while training goes on: the slices are copied to host memory, a thread writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError

import torch

from lnn_lightning.checkpoint.errors import CheckpointError
from lnn_lightning.checkpoint.pieces import Pieces


class BackgroundWriter:
    """Runs one write at a time; its error is raised by whoever waits for it next."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lnn-checkpoint")
        self._pending: Future[None] | None = None
        self._after: list[Callable[[], None]] = []
        self._copies: dict[str, Pieces] = {}

    def snapshot(self, tensors: Mapping[str, Pieces]) -> dict[str, Pieces]:
        """Copies in host memory, which the next snapshot uses again: wait for the write of the last one first."""
        self._copies = {name: pieces.copied(self._copies.get(name)) for name, pieces in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return dict(self._copies)

    @property
    def busy(self) -> bool:
        """Whether a write goes on, or has ended and nobody has asked how."""
        return self._pending is not None

    def start(self, write: Callable[[], None]) -> None:
        """Starts a write; :meth:`wait` comes before the next."""
        assert self._pending is None
        self._pending = self._thread.submit(write)

    def afterwards(self, act: Callable[[], None]) -> None:
        """What is done when the write that goes on has succeeded (removing what it replaces), or now if none does."""
        if self._pending is None:
            act()
        else:
            self._after.append(act)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the write that goes on.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            CheckpointError: it failed, or did not end in time.
        """
        if self._pending is None:
            return
        pending, after = self._pending, self._after
        try:
            pending.result(timeout)
        except TimeoutError as error:
            raise CheckpointError(f"A checkpoint is not written after {timeout} s; it is given up.") from error
        finally:
            self._pending, self._after = None, []
        for act in after:
            act()
