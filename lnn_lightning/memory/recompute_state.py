"""What a unit's run depends on and changes besides its arguments: random numbers, buffers, attributes, hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lnn_lightning.parallel.step.extension import UnitRun
from lnn_lightning.parallel.step.hooks import hooks_set_aside
from lnn_lightning.parallel.step.leftovers import attributes_preserved
from lnn_lightning.parallel.step.randomness import (
    generators_as_now,
    preserved_generators,
    preserved_rng,
    random_as_now,
)


class Before:
    """A unit's surroundings as they are now, before it runs, so that it can run again as if for the first time.

    Args:
        run: the unit about to run.
        device: where it runs.
    """

    def __init__(self, run: UnitRun, device: torch.device) -> None:
        self._unit, self._device = run.unit, device
        # a unit known to be random seeds itself; others may draw from Python's or numpy's generators all the same
        self._random = None if run.call.random else random_as_now(device)
        self._generators = generators_as_now(run.unit)
        self._autocast = [_autocast_as_now(kind) for kind in dict.fromkeys((device.type, "cpu"))]
        self._buffers = {id(buffer): (buffer, buffer._version, buffer.clone()) for buffer in _buffers(run.unit)}
        self._changed: dict[int, Tensor] = {}

    def settle(self) -> None:
        """Behind the run: of the buffers, keeps the values of those that it changed."""
        for key, (buffer, version, value) in self._buffers.items():
            if buffer._version != version:
                self._changed[key] = value
        self._buffers = {}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the unit runs as it ran, and nothing that it does besides computing its result stays."""
        unit = self._unit
        with ExitStack() as stack:
            stack.enter_context(preserved_rng(self._device))
            stack.enter_context(preserved_generators(unit))
            stack.enter_context(attributes_preserved(unit))
            stack.enter_context(self._own_buffers())
            for store in ("_forward_pre_hooks", "_forward_hooks"):
                stack.enter_context(hooks_set_aside(unit, store))
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            if self._random is not None:
                self._random()
            self._generators()
            yield

    @contextmanager
    def _own_buffers(self) -> Iterator[None]:
        """The unit has copies of its buffers inside, with the values from before its run."""
        stores = [(module, dict(module._buffers)) for module in self._unit.modules() if module._buffers]
        copies: dict[int, Tensor] = {}
        for module, store in stores:
            for name, buffer in store.items():
                if buffer is not None:
                    copies.setdefault(id(buffer), self._changed.get(id(buffer), buffer).clone())
                    module._buffers[name] = copies[id(buffer)]
        try:
            yield
        finally:
            for module, store in stores:
                module._buffers.clear()
                module._buffers.update(store)


def _buffers(unit: nn.Module) -> list[Tensor]:
    return [buffer for buffer in unit.buffers() if not buffer.is_inference()]


def _autocast_as_now(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
