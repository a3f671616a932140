"""Saved tensors in host memory or in a file between a micro-batch's forward and its backward.

What a forward saves moves out behind it, and comes back ahead of the backward, which needs it in reverse order. With
recomputation a block saves its inputs only, and those are what moves: the job of fairscale's
``checkpoint_wrapper(offload_to_cpu=True)``, which wraps the user's blocks (their names change), recomputes always, and
copies while the GPU waits.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lnn_lightning.memory.offload.store import FileStore, Region, padded
from lnn_lightning.memory.offload.streams import Copy, SideStream
from lnn_lightning.memory.saved_tensors import Microbatch
from lnn_lightning.parallel.step.extension import StepExtension

IN_FLIGHT = 64 * 2**20
"""Bytes that may be on their way out, and on their way back."""


class Moved:
    """A tensor that was taken; what it stands for is freed with it.

    Args:
        source: the tensor, until it is away.
        place: number in the order of its micro-batch.
        microbatch: stage and number of the micro-batch.
        freed: takes what is to be freed.
    """

    def __init__(self, source: Tensor, place: int, microbatch: Microbatch, freed: deque[tuple[Region, Any]]) -> None:
        self.source: Tensor | None = source
        self.place, self.microbatch, self._freed = place, microbatch, freed
        self.numel, self.dtype, self.device = source.numel(), source.dtype, source.device
        self.nbytes = source.numel() * source.element_size()
        self.shape, self.strides = source.shape, source.stride()
        self.region: Region | None = None
        self.host: Tensor | None = None
        """The copy in host memory; of a file only while it is on its way."""
        self.out: Copy | None = None
        self.written: Future[None] | None = None
        self.read: Future[Tensor] | None = None
        self.back: Copy | None = None
        self.ready: Tensor | None = None

    def forget(self) -> None:
        """Frees what was brought back; it can be brought back again."""
        self.read = self.back = self.ready = None

    def __del__(self) -> None:
        if self.region is not None:
            self._freed.append((self.region, self.written))


class ActivationKeeper(StepExtension):
    """Takes saved tensors out of the device's memory and brings them back in time.

    Args:
        store: the file; None: host memory.
        pin: host memory is page-locked.
    """

    def __init__(self, store: FileStore | None, pin: bool) -> None:
        self._store, self._pin = store, pin
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="offload-activations")
        self._scratch = threading.local()
        self._stream: SideStream | None = None
        self._order: dict[Microbatch, list[ref[Moved]]] = {}
        self._leaving: deque[Moved] = deque()
        self._freed: deque[tuple[Region, Future[None] | None]] = deque()
        self.moved_bytes = 0
        """Bytes taken so far."""

    # ---------------------------------------------------------------- out

    def put(self, tensor: Tensor, microbatch: Microbatch) -> Moved:
        """Takes a tensor; see :class:`~lnn_lightning.memory.saved_tensors.Keeper`.

        Raises:
            OffloadError: the disk is full, or gave an error.
        """
        self._free()
        dense = tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()
        shape, strides, tensor = dense.shape, dense.stride(), dense.as_strided((dense.numel(),), (1,))
        order = self._order.setdefault(microbatch, [])
        moved = Moved(tensor, len(order), microbatch, self._freed)
        moved.shape, moved.strides = shape, strides
        order.append(ref(moved))
        self.moved_bytes += moved.nbytes
        if tensor.is_cuda:
            self._stream = self._stream or SideStream(tensor.device)
            moved.host = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=self._pin)
            moved.out = self._stream.copy(tensor, moved.host)
        if self._store is not None:
            moved.region = self._store.allocate(tensor.numel(), tensor.dtype)
            host = tensor if moved.host is None else moved.host
            moved.written = self._pool.submit(self._write, self._store, moved.region, host, moved.out)
        self._leaving.append(moved)
        self._limit()
        return moved

    def _write(self, store: FileStore, region: Region, host: Tensor, arrives: Copy | None) -> None:
        if arrives is not None:
            arrives.wait_on_host()
        # memory of torch's own allocator is not aligned, and would go through the page cache
        if getattr(self._scratch, "buffer", None) is None or self._scratch.buffer.numel() < region.nbytes:
            self._scratch.buffer = self._memory(region.nbytes, torch.uint8)
        aligned = self._scratch.buffer[: host.numel() * host.element_size()].view(host.dtype)
        store.write(region, aligned.copy_(host)).result()

    def _limit(self) -> None:
        """Lets go of the sources of what is away, and waits where too much is on its way."""
        leaving = sum(moved.nbytes for moved in self._leaving)
        while self._leaving and (leaving > IN_FLIGHT or self._is_away(self._leaving[0])):
            moved = self._leaving.popleft()
            leaving -= moved.nbytes
            if moved.written is not None:
                moved.written.result()
                moved.host = None
            elif moved.out is not None:
                moved.out.wait_on_host()
            moved.source = moved.out = None

    @staticmethod
    def _is_away(moved: Moved) -> bool:
        if moved.written is not None:
            return moved.written.done()
        return moved.out is None or moved.out.is_done()

    def _free(self) -> None:
        for _ in range(len(self._freed)):
            region, written = self._freed.popleft()
            if written is None or written.done():
                assert self._store is not None
                self._store.free(region)
            else:
                self._freed.append((region, written))

    # ---------------------------------------------------------------- back

    def get(self, token: Moved) -> Tensor:
        """The tensor, and begins to bring back what was taken before it.

        Raises:
            OffloadError: the disk gave an error.
        """
        self._bring(token)
        self._ahead(token.microbatch, token.place)
        if token.source is not None:
            return token.source.as_strided(token.shape, token.strides)
        if token.ready is None:
            if token.back is None:
                host = token.host if token.read is None else token.read.result()
                assert host is not None
                token.back = self._to_device(host, token.device)
            token.ready = token.back.wait()
            token.read = token.back = None
        return token.ready.as_strided(token.shape, token.strides)

    def _bring(self, token: Moved) -> None:
        if token.source is not None or token.ready is not None:
            return
        if self._store is not None:
            if token.read is None:
                assert token.region is not None
                token.read = self._pool.submit(self._read, self._store, token.region)
        elif token.back is None:
            assert token.host is not None
            token.back = self._to_device(token.host, token.device)

    def _read(self, store: FileStore, region: Region) -> Tensor:
        buffer = self._memory(region.numel, region.dtype)
        store.read(region, buffer).result()
        return buffer

    def _memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Aligned memory at the begin of a storage (what was saved is a view of it), which the system has back at once.

        Blocks that the C library hands out in one thread and gets back in another pile up in its arenas.
        """
        if self._pin:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, padded(numel * dtype.itemsize)), dtype=dtype)[:numel]

    def _to_device(self, host: Tensor, device: torch.device) -> Copy:
        if host.device == device:
            return Copy(host, None)
        assert self._stream is not None
        return self._stream.copy(host, torch.empty_like(host, device=device))

    def _ahead(self, microbatch: Microbatch, place: int) -> None:
        """Begins to bring back what was taken before a place of the order."""
        order, nbytes = self._order.get(microbatch, []), 0
        for reference in reversed(order[:place]):
            if (moved := reference()) is None:
                continue
            self._bring(moved)
            nbytes += moved.nbytes
            if nbytes >= IN_FLIGHT:
                return

    def backward(self, stage: int, index: int) -> AbstractContextManager[None]:
        """Around a stage's backward of a micro-batch."""
        return self._bringing((stage, index))

    @contextmanager
    def _bringing(self, microbatch: Microbatch) -> Iterator[None]:
        order = self._order.get(microbatch, [])
        self._limit()
        self._ahead(microbatch, len(order))
        yield
        left = [moved for reference in order if (moved := reference()) is not None]
        for moved in left:  # a weight backward comes later
            moved.forget()
        if not left:
            self._order.pop(microbatch, None)

    def finish(self) -> None:
        """Behind a step."""
        self._order.clear()
        self._leaving.clear()
