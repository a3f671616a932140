"""Local SGD: ranks step by themselves and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lnn_lightning.communication.compression import Compression, Compressor, Ranks
from lnn_lightning.communication.settings import is_number
from lnn_lightning.parallel.errors import LayoutError

_FLAT = 2**24
"""Elements that are averaged at a time: what is copied beside the parameters."""


@dataclass(frozen=True)
class LocalSGD(Compression):
    """Post-local SGD (Lin et al. 2020, arXiv 1808.07217).

    Gradients are averaged in the first ``start_step`` steps. From then on each data rank steps with the gradients of
    its own samples, and parameters are averaged behind every ``every`` steps; besides before a validation, before a
    checkpoint is saved, and at the end of an epoch and of training, so that what is seen there is the same on all
    ranks. These do not shift the others. Before a checkpoint the optimizers' state is averaged too, of which ranks have
    their own otherwise: a run that is resumed from it goes on as the run that saved it did. Gradients are clipped by
    the norm of a rank's own.

    Args:
        every: steps between averages.
        start_step: steps before the first one that a rank does by itself.

    Raises:
        LayoutError: a number below its least.
    """

    every: int = 4
    start_step: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("start_step", 0)):
            value = getattr(self, name)
            if not is_number(value, whole=True) or value < least:
                raise LayoutError(f"LocalSGD's `{name}` must be a whole number of at least {least}, got {value!r}.")

    @override
    def compressor(self, ranks: Ranks) -> LocalSteps:
        return LocalSteps(ranks, self)


class LocalSteps(Compressor):
    """Leaves gradients as they are, and averages parameters when it is told to.

    Outside of the strategies, which do it by themselves: behind each optimizer step :meth:`settle` if :attr:`is_due`,
    and before parameters are looked at.
    """

    def __init__(self, ranks: Ranks, settings: LocalSGD) -> None:
        super().__init__(ranks)
        self._settings = settings
        self._averaged = 0  # behind which step

    @override
    def _reduce(self, gradients: Mapping[str, Tensor]) -> None:
        if self.step < self._settings.start_step:
            self.average(list(gradients.values()))

    def apart_since(self, step: int) -> bool:
        """Whether ranks have stepped by themselves behind a step."""
        return self.step > max(step, self._settings.start_step)

    @property
    def is_due(self) -> bool:
        """Whether parameters are to be averaged behind this step."""
        return self._periods(self.step) > self._periods(self._averaged)

    def _periods(self, step: int) -> int:
        return max(step - self._settings.start_step, 0) // self._settings.every

    def settle(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Averages parameters, unless ranks hold the same. Collective.

        Args:
            parts: lists of parameters, the same on all ranks. Where other groups of ranks hold the same parameters
                too, put those they share into a list of their own: in which order ranks are added up depends on what
                else is sent with them.
        """
        if self.apart_since(self._averaged):
            self.average_all(parts)
        self._averaged = self.step

    @torch.no_grad()
    def average_all(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Averages tensors, so many at a time. Collective."""
        for part in parts:
            for some in _in_bounds(part):
                self.average(some)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._averaged = self.step  # a checkpoint has the same parameters for all ranks


def _in_bounds(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in lists of a limited size."""
    some: list[Tensor] = []
    for tensor in tensors:
        some.append(tensor)
        if sum(each.numel() for each in some) >= _FLAT:
            yield some
            some = []
    if some:
        yield some


def of_optimizer(optimizer: torch.optim.Optimizer, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """What an optimizer keeps of parameters: its tensors of real numbers, but for counts of steps."""
    return [
        [
            value
            for parameter in part
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point() and key != "step"
        ]
        for part in parts
    ]
