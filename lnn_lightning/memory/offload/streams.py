"""Copies between a GPU and host memory beside its computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Copy:
    """A copy that may be under way.

    Attributes:
        result: what is copied to.
        event: recorded behind it; None: it is there.
    """

    result: Tensor
    event: torch.cuda.Event | None

    def is_done(self) -> bool:
        """Whether it is there."""
        return self.event is None or self.event.query()

    def wait_on_host(self) -> None:
        """Waits until it is there."""
        if self.event is not None:
            self.event.synchronize()

    def wait(self) -> Tensor:
        """What is launched from now on on the current stream sees it."""
        if self.event is not None:
            torch.cuda.current_stream(self.result.device if self.result.is_cuda else None).wait_event(self.event)
        return self.result


class SideStream:
    """A stream of its own for copies, in the order they are asked for.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, source: Tensor, target: Tensor) -> Copy:
        """Copies behind everything that the current stream was given so far.

        The caller keeps a source or target in host memory until the copy is done; the one on the GPU may be dropped.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        for tensor in (source, target):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return Copy(target, event)
