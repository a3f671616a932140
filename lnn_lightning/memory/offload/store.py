"""Places outside of the device's memory: host memory, or a file.

A file is read and written past the page cache (``O_DIRECT``), so that what is in it takes no memory, by a pool of
threads (Python's lock is released meanwhile). It can be looked at as tensors too, mapped from the file, which is how
checkpoints read it; what was read that way is given back by :meth:`Store.release`. Where the file system has no direct
access, or one that does not agree with its mappings, the file is read through the page cache, which is then emptied.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lnn_lightning.memory.offload.files import mapped, new_file, refusal, room_of, take_room
from lnn_lightning.memory.offload.settings import Offload, OffloadError

ALIGNED = 4096
"""Bytes; direct access is to multiples of it, in the file and in memory."""


@dataclass(frozen=True)
class Region:
    """A place in a store.

    Attributes:
        offset: first byte in the file, or number of the tensor in memory.
        numel: elements.
        dtype: of the elements.
    """

    offset: int
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, with what it is filled up by."""
        return padded(self.numel * self.dtype.itemsize)


class Store(Protocol):
    """Keeps one-dimensional tensors. Regions are made and freed by one thread; all may read and write."""

    in_place: bool
    """Whether :meth:`tensor` is memory like any other, so that nothing need be read or written."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Region:
        """A new region; what is in it is not defined."""

    def read(self, region: Region, out: Tensor, start: int = 0) -> Future[None]:
        """Fills ``out`` (contiguous, on the CPU, fastest from :meth:`buffer`) with elements from ``start`` on."""

    def write(self, region: Region, value: Tensor, start: int = 0) -> Future[None]:
        """The opposite; ``value`` must stay as it is until the future is done."""

    def tensor(self, region: Region) -> Tensor:
        """The region itself, as a tensor on the CPU."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory to read to and write from, page-locked where a GPU copies from it."""

    def release(self) -> None:
        """Gives back memory that tensors of :meth:`tensor` took when they were looked at; they can still be used."""

    def free(self, region: Region) -> None:
        """The region may be given to others."""

    def close(self) -> None:
        """Waits for what is under way. Tensors that were taken can still be used."""


def open_store(settings: Offload, pin: bool) -> Store:
    """The store that the settings ask for."""
    return FileStore(settings.target, settings.threads, pin) if settings.in_file else HostStore(pin)


def check_bandwidth(store: Store, minimum: float, numel: int = 16 << 20) -> None:
    """Measures how fast a store is.

    Args:
        store: any.
        minimum: MB/s.
        numel: bytes to try it with.

    Raises:
        OffloadError: it writes or reads more slowly.
    """
    region, buffer = store.allocate(numel, torch.uint8), store.buffer(numel, torch.uint8)
    for what, act in (("writes", store.write), ("reads", store.read)):
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            act(region, buffer.fill_(1)).result()
            best = min(best, time.perf_counter() - start)
        if (measured := numel / best / 1e6) < minimum:
            raise OffloadError(
                f"The disk that is offloaded to {what} {measured:.0f} MB/s; `minimum_bandwidth` asks for {minimum:g}. "
                "Set another `target`, or a smaller bound."
            )
    store.free(region)


def padded(nbytes: int) -> int:
    """Bytes to the next multiple of :data:`ALIGNED`."""
    return -(-nbytes // ALIGNED) * ALIGNED


def aligned_buffer(numel: int, dtype: torch.dtype, pin: bool) -> Tensor:
    """A tensor whose memory begins at a multiple of :data:`ALIGNED` and goes on to the next."""
    memory = torch.empty(padded(numel * dtype.itemsize) + ALIGNED, dtype=torch.uint8, pin_memory=pin)
    start = -memory.data_ptr() % ALIGNED
    return memory[start : start + numel * dtype.itemsize].view(dtype)


class HostStore:
    """Keeps tensors in host memory.

    Args:
        pin: page-locked.
    """

    in_place = True

    def __init__(self, pin: bool = False) -> None:
        self._pin = pin
        self._tensors: dict[int, Tensor] = {}
        self._made = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Region:
        """See :class:`Store`."""
        self._made += 1
        self._tensors[self._made] = torch.empty(numel, dtype=dtype, pin_memory=self._pin)
        return Region(self._made, numel, dtype)

    def read(self, region: Region, out: Tensor, start: int = 0) -> Future[None]:
        """See :class:`Store`."""
        out.copy_(self.tensor(region)[start : start + out.numel()])
        return _done()

    def write(self, region: Region, value: Tensor, start: int = 0) -> Future[None]:
        """See :class:`Store`."""
        self.tensor(region)[start : start + value.numel()].copy_(value)
        return _done()

    def tensor(self, region: Region) -> Tensor:
        """See :class:`Store`."""
        return self._tensors[region.offset]

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Store`."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._pin)

    def release(self) -> None:
        """See :class:`Store`; nothing was taken."""

    def free(self, region: Region) -> None:
        """See :class:`Store`."""
        self._tensors.pop(region.offset, None)

    def close(self) -> None:
        """See :class:`Store`."""
        self._tensors.clear()


class FileStore:
    """Keeps tensors in a file of this process. The file loses its name at once: when the process ends, it is gone.

    Args:
        folder: an existing folder on a disk.
        threads: that read and write.
        pin: buffers are page-locked.
        direct: past the page cache, if the file system can.

    Raises:
        OffloadError: the folder does not exist or cannot be written to.
    """

    in_place = False

    def __init__(self, folder: str | Path, threads: int = 4, pin: bool = False, direct: bool = True) -> None:
        self._pin = pin
        self.folder, path, self._cached = new_file(folder, "offload")
        try:
            self._direct = _open_direct(path) if direct else None
        finally:
            path.unlink()
        fds = [self._cached] if self._direct is None else [self._cached, self._direct]
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._windows: list[tuple[int, mmap.mmap]] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="offload")
        self._closed = weakref.finalize(self, _close, fds)
        if self._direct is not None and not self._is_coherent():
            self._direct = None

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return self._direct is not None

    def allocate(self, numel: int, dtype: torch.dtype) -> Region:
        """See :class:`Store`.

        Raises:
            OffloadError: the disk is full.
        """
        size = max(padded(numel * dtype.itemsize), ALIGNED)
        with self._lock:
            if self._free.get(size):
                return Region(self._free[size].pop(), numel, dtype)
            take_room(self._cached, self.folder, self._end, size, self.room())
            self._end += size
            return Region(self._end - size, numel, dtype)

    def room(self) -> int:
        """Bytes that the disk has left for more regions."""
        return room_of(self._cached)

    def read(self, region: Region, out: Tensor, start: int = 0) -> Future[None]:
        """See :class:`Store`."""
        return self._pool.submit(self._transfer, os.preadv, region, out, start)

    def write(self, region: Region, value: Tensor, start: int = 0) -> Future[None]:
        """See :class:`Store`."""
        return self._pool.submit(self._transfer, os.pwritev, region, value, start)

    def tensor(self, region: Region) -> Tensor:
        """See :class:`Store`."""
        start, window = self._window_of(region.offset, region.offset + max(region.nbytes, ALIGNED))
        if region.numel == 0:
            return torch.empty(0, dtype=region.dtype)
        return torch.frombuffer(window, dtype=region.dtype, count=region.numel, offset=region.offset - start)

    def _window_of(self, begin: int, end: int) -> tuple[int, mmap.mmap]:
        with self._lock:
            for start, window in self._windows:
                if start <= begin and end <= start + len(window):
                    return start, window
            last = self._windows[-1][0] + len(self._windows[-1][1]) if self._windows else 0
            start = min(last, begin)
            self._windows.append((start, mapped(self._cached, start, self._end - start)))
            return self._windows[-1]

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Store`."""
        return aligned_buffer(numel, dtype, self._pin)

    def release(self) -> None:
        """See :class:`Store`. What somebody wrote to such a tensor is on the disk then."""
        for _, window in list(self._windows):
            window.madvise(mmap.MADV_DONTNEED)
        os.fdatasync(self._cached)
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def free(self, region: Region) -> None:
        """See :class:`Store`."""
        with self._lock:
            self._free.setdefault(max(region.nbytes, ALIGNED), []).append(region.offset)

    def close(self) -> None:
        """See :class:`Store`."""
        self._pool.shutdown(wait=True)
        self._windows.clear()
        self._closed()

    def _transfer(self, act: Callable[..., int], region: Region, tensor: Tensor, start: int) -> None:
        offset = region.offset + start * region.dtype.itemsize
        nbytes = tensor.numel() * tensor.dtype.itemsize
        last = start + tensor.numel() == region.numel
        fd, view = self._cached, _bytes(tensor, nbytes)
        if self._direct is not None and (direct := _aligned(tensor, offset, nbytes, last)) is not None:
            fd, view = self._direct, direct
        try:
            _all(act, fd, view, offset)
            if fd == self._cached:
                if act is os.pwritev:
                    os.fdatasync(fd)
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise OffloadError(refusal(self.folder, error)) from error

    def _is_coherent(self) -> bool:
        """Whether what is written directly is seen in a mapping and the other way round."""
        region, buffer = self.allocate(ALIGNED // 4, torch.float32), self.buffer(ALIGNED // 4, torch.float32)
        region_itself = self.tensor(region)
        seen = []
        try:
            for value in (1.0, 2.0):
                seen.append(float(region_itself[0]) != value)
                self._transfer(os.pwritev, region, buffer.fill_(value), 0)
                seen.append(float(region_itself[0]) == value)
                region_itself.fill_(-value)
                self._transfer(os.preadv, region, buffer, 0)
                seen.append(float(buffer[-1]) == -value)
        except OffloadError:
            return False
        finally:
            self.free(region)
        return all(seen)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0)) if hasattr(os, "O_DIRECT") else None
    except OSError:  # the file system has no such thing
        return None


def _bytes(tensor: Tensor, nbytes: int) -> memoryview:
    start = tensor.storage_offset() * tensor.dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (nbytes,))  # type: ignore[call-overload]
    return memoryview(raw.numpy())


def _aligned(tensor: Tensor, offset: int, nbytes: int, last: bool) -> memoryview | None:
    """What direct access to a tensor's memory takes; None if it cannot. The end of a region may be filled up."""
    room = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.dtype.itemsize
    size = padded(nbytes) if last else nbytes
    if offset % ALIGNED or tensor.data_ptr() % ALIGNED or size % ALIGNED or size > room:
        return None
    return _bytes(tensor, size)


def _all(act: Callable[..., int], fd: int, view: memoryview, offset: int) -> None:
    """Reads or writes to the end, though the system may do less in one call."""
    while view:
        count = act(fd, [view], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file is shorter than it was")
        if count < len(view) and count % ALIGNED:  # what comes next could not be direct
            raise OSError(errno.ENOSPC if act is os.pwritev else errno.EIO, "only a part was transferred")
        view, offset = view[count:], offset + count
