"""What a unit's run depends on and changes besides its arguments: random numbers, buffers, attributes, hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lnn_lightning.parallel.step.extension import UnitRun
from lnn_lightning.parallel.step.hooks import hooks_set_aside
from lnn_lightning.parallel.step.leftovers import attributes_preserved, plain_attributes
from lnn_lightning.parallel.step.randomness import (
    generators_as_now,
    preserved_generators,
    preserved_rng,
    random_as_now,
)

_SMALL = 1 << 16


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
        self._buffers = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in _buffers(run.unit).items()}
        self._attributes = plain_attributes(run.unit)

    def settle(self) -> None:
        """Behind the run: of buffers and attributes, keeps the values of those that it changed."""
        now = _buffers(self._unit)
        self._buffers = {
            name: (buffer, version, value)
            for name, (buffer, version, value) in self._buffers.items()
            if now.get(name) is not buffer or _changed(buffer, version, value)
        }
        after = plain_attributes(self._unit)
        self._attributes = {
            key: value for key, value in self._attributes.items() if key not in after or after[key] != value
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the unit runs as it ran, and nothing that it does besides computing its result stays."""
        unit = self._unit
        with ExitStack() as stack:
            stack.enter_context(preserved_rng(self._device))
            stack.enter_context(preserved_generators(unit))
            stack.enter_context(attributes_preserved(unit))
            for (module, name), value in self._attributes.items():
                vars(module)[name] = value
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
        for prefix, module in self._unit.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    source, _, value = self._buffers.get((prefix, name), (buffer, 0, buffer))
                    copies.setdefault(id(source), value.clone())
                    module._buffers[name] = copies[id(source)]
        try:
            yield
        finally:
            for module, store in stores:
                module._buffers.clear()
                module._buffers.update(store)


def _buffers(unit: nn.Module) -> dict[tuple[str, str], Tensor]:
    """(Name of the module, name of the buffer) -> buffer."""
    return {
        (prefix, name): buffer
        for prefix, module in unit.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    }


def _changed(buffer: Tensor, version: int, value: Tensor) -> bool:
    """Whether a buffer may have other values than before, also through ``.data``, which has no version."""
    if buffer._version != version:
        return True
    if isinstance(buffer, FakeTensor) or buffer.is_meta:
        return False
    # of small ones the values are kept rather than compared, for which the device would be waited for
    return value.nbytes <= _SMALL or buffer.shape != value.shape or not torch.equal(buffer, value)


def _autocast_as_now(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
