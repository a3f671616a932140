"""What glue code needs help with while it runs on several stages: random numbers, and masks of absent values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lnn_lightning.parallel.step.randomness import current_forks, is_random, seed_of, seed_torch
from lnn_lightning.parallel.step.tree import tree_tensors

aten = torch.ops.aten


class GlueMode(TorchDispatchMode):
    """Watches the operations outside the units in one run of the step.

    Each random operation is seeded by its number in the run; those on absent values are counted too, so the numbers
    agree between stages. A real mask on an absent value becomes the indices it stands for.

    Args:
        seed: seed of the run's glue.
        device: device of the values.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._seed, self._device = seed, device
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func):
            self._count += 1
            seed = seed_of(self._seed, self._count, *current_forks())
            seed_torch(seed, self._device)
            if (generator := kwargs.get("generator")) is not None:
                generator.manual_seed(seed)
        func, args = masks_as_indices(func, args)
        return func(*args, **kwargs)

    def suspended(self) -> AbstractContextManager[None]:
        """Steps aside inside a unit, which is seeded as a whole."""
        return without_mode(self)


@contextmanager
def without_mode(mode: TorchDispatchMode) -> Iterator[None]:
    """The innermost dispatch mode steps aside inside; does nothing if another one is."""
    if _get_current_dispatch_mode() is not mode:
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def glue_mode(needed: bool, seed: int, device: torch.device) -> AbstractContextManager[GlueMode | None]:
    """Context for the glue code of one run; a no-op unless needed."""
    return GlueMode(seed, device) if needed else nullcontext()


def masks_as_indices(func: Any, args: Any) -> tuple[Any, Any]:
    """Replaces a real boolean mask on a fake tensor, whose result's shape depends on the mask, by integer indices."""
    if func is aten.masked_select.default and _masks_fake(args[0], [args[1]]):
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return aten.index.Tensor, (args[0].expand(shape), list(args[1].expand(shape).nonzero().unbind(1)))
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and _masks_fake(args[0], args[1]):
        indices: list[Tensor | None] = []
        for index in args[1]:
            indices += index.nonzero().unbind(1) if _is_real_mask(index) else [index]
        return func, (args[0], indices, *args[2:])
    return func, args


def _masks_fake(value: Any, indices: Any) -> bool:
    return any(isinstance(each, FakeTensor) for each in tree_tensors(value)) and any(map(_is_real_mask, indices))


def _is_real_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor)
