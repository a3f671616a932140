"""Parameters in a file: in memory while their unit computes, in forward, in backward and in evaluation.

A unit's parameters are fetched with those of the next ones in the order of the step (backwards in backward, which
begins when a gradient arrives at the unit's outputs), and those of all others are given back. The order is learned from
the calls as they come. Parameters that code between units uses are read when they are looked at, and given back behind
the step; so are all behind an optimizer's step, before the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.memory.offload.pages import PageFile, Pages
from lnn_lightning.parallel.step.extension import Body, StepExtension, UnitRun
from lnn_lightning.parallel.step.tree import tree_leaves


class ParameterPages(StepExtension):
    """Keeps the parameters of a module in a file.

    Args:
        file: where they lie.
        prefetch: units that are fetched ahead.
    """

    def __init__(self, file: PageFile, prefetch: int) -> None:
        self._file, self._prefetch = file, prefetch
        self._pages: dict[str, Pages] = {}
        self._calls: dict[bool, dict[int, list[Pages]]] = {True: {}, False: {}}
        self._here: dict[Pages, Future[None]] = {}
        self._training = self._backward = False

    def take(self, name: str, value: Tensor) -> Tensor:
        """Moves the values of a parameter to the file.

        Args:
            name: its first name in the module.
            value: its memory, or a piece of it.

        Returns:
            Its new memory.

        Raises:
            OffloadError: the disk is full.
        """
        moved = self._file.moved(value)
        if moved is not value:
            self._pages[name] = self._file.pages([moved])[0]
        return moved

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(pages.nbytes for pages in self._pages.values())

    def begin(self, parts: int, training: bool) -> None:
        """Before a step: gives back what an optimizer and whoever else has looked at."""
        self._training, self._backward = training, False
        self._file.drop_all()

    def finish(self) -> None:
        """Behind a step."""
        for fetched in self._here.values():
            fetched.cancel()
        self._here.clear()
        self._file.drop_all()

    def backward(self, stage: int, index: int) -> AbstractContextManager[None]:
        """Around a stage's backward: units that run in it (recomputation) come in reverse order."""
        return self._in_backward()

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        self._backward = True
        try:
            yield
        finally:
            self._backward = False

    def call(self, run: UnitRun, body: Body, args: Any, kwargs: Any) -> Any:
        """Runs a unit with its parameters in memory."""
        index, calls = run.call.index, self._calls[self._training]
        calls[index] = [self._pages[name] for name in sorted(run.call.parameters) if name in self._pages]
        self._use(index, -1 if self._backward else 1)
        out = body(*args, **kwargs)
        if self._training and not self._backward:
            leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
            if leaves:
                torch.autograd.graph.register_multi_grad_hook(leaves, partial(self._gradient, index), mode="any")
        return out

    def _gradient(self, index: int, _: Tensor) -> None:
        self._use(index, -1)

    def _use(self, index: int, direction: int) -> None:
        """Fetches the parameters of a call and of the next ones, and gives all others back."""
        calls = self._calls[self._training]
        ahead = [index + direction * step for step in range(self._prefetch + 1)]
        wanted = {pages: None for each in ahead for pages in calls.get(each, ())}
        gone = [pages for pages in self._here if pages not in wanted]
        for pages in gone:
            self._here.pop(pages).cancel()
        self._file.drop_pages(gone)
        for pages in wanted:
            if pages not in self._here:
                self._here[pages] = self._file.fetch([pages])
        for pages in calls[index]:
            self._here[pages].result()
