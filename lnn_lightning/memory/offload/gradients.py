"""Gradients in a file: moved there as each is made, and given back behind every use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lnn_lightning.memory.offload.pages import PageFile, Place, can_move
from lnn_lightning.parallel.data.shards import local_of
from lnn_lightning.parallel.step.extension import StepExtension


class GradientPages(StepExtension):
    """Keeps the gradients of parameters in a file.

    ``parameter.grad`` becomes a tensor there as soon as it is made, and what is added later is added there. Two windows
    of accumulation may meet (the sum so far, and the gradients of a step on their way to it), so a parameter has as
    many places as gradients of it are alive.

    Args:
        file: where they lie.
        parameters: those of this rank; of sharded ones the gradients of their pieces are kept.
    """

    def __init__(self, file: PageFile, parameters: Iterable[nn.Parameter]) -> None:
        self._file, self._parameters = file, list(parameters)
        self._places: dict[nn.Parameter, list[tuple[Place, StorageWeakRef]]] = {}
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_mover(weakref.ref(self)))

    def begin(self, parts: int, training: bool) -> None:
        """Before a step: gives back what was looked at since the last one."""
        self._file.drop_all()

    def backward(self, stage: int, index: int) -> AbstractContextManager[None]:
        """Around a stage's backward: gradients that were not made by accumulating (zero bubble) are moved behind it."""
        return self._moving()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        yield
        for parameter in self._parameters:
            if parameter.grad is not None and not self._file.pages([local_of(parameter.grad)]):
                self._move(parameter)

    def _move(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient = local_of(parameter.grad)
        if not self._file.pages([gradient]):
            if gradient.requires_grad or not can_move(gradient):
                return
            moved = self._free_place(parameter, gradient)
            moved.copy_(gradient)
            if isinstance(parameter.grad, DTensor):
                parameter.grad._local_tensor = moved
            else:
                parameter.grad = moved
            gradient = moved
        self._file.drop([gradient])

    def _free_place(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        places = self._places.setdefault(parameter, [])  # type: ignore[arg-type]
        for index, (place, user) in enumerate(places):
            if user.expired() and place.pages.nbytes >= gradient.numel() * gradient.element_size():
                moved = place.tensor(gradient)
                places[index] = place, StorageWeakRef(moved.untyped_storage())
                return moved
        place = self._file.allocate(gradient)
        moved = place.tensor(gradient)
        places.append((place, StorageWeakRef(moved.untyped_storage())))
        return moved


def _mover(pages: weakref.ref[GradientPages]) -> Callable[[Tensor], None]:
    """A hook that does not keep alive, by way of its parameter, what keeps the parameter."""

    def move(parameter: Tensor) -> None:
        if (mine := pages()) is not None:
            mine._move(parameter)

    return move
