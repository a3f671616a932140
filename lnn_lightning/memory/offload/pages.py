"""Tensors whose memory is a file: their pages are fetched before they are used and given back behind it.

Such a tensor can be used like any other at any time. What is not in memory is read when it is looked at, so that
hooks, callbacks, optimizers and checkpoints see right values without knowing of it: a page that was not fetched ahead
costs time, never a wrong number. Pages that are given back leave this process at once and the page cache as soon as
they are on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.memory.offload.files import mapped, new_file, refusal, room_of, take_room
from lnn_lightning.memory.offload.settings import OffloadError

WORTHWHILE = 2 * mmap.PAGESIZE
"""Bytes; smaller tensors stay in memory."""
_POPULATE_READ = 22
"""``MADV_POPULATE_READ`` (Linux 5.14): reads pages, and answers with an error where touching them would kill."""
_WILL_NEED, _DO_NOT_NEED = 3, 4

_libc: Any = None
if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Pages:
    """Where a tensor lies.

    Attributes:
        address: in memory.
        offset: in the file.
        nbytes: length, in whole pages.
    """

    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Place:
    """Room for a tensor in a file.

    Attributes:
        pages: where it is.
        memory: a mapping that it lies in.
        start: where in it.
    """

    pages: Pages
    memory: mmap.mmap
    start: int

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor here, with shape, strides and dtype of a dense one; its storage is its own, the memory is not."""
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=self.start)
        return flat.as_strided(like.shape, like.stride())


class PageFile:
    """A file of this process that is the memory of tensors. It has no name, and is gone when the process ends.

    Args:
        folder: an existing folder on a disk.

    Raises:
        OffloadError: the folder does not exist or cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        if _libc is None:
            raise OffloadError(f"Parameters and gradients in files need Linux; this is {sys.platform}.")
        self.folder, path, self._fd = new_file(folder, "pages")
        path.unlink()
        self._end = 0
        self._window: tuple[int, mmap.mmap] | None = None
        self._pages: dict[int, Pages] = {}
        # one thread reads, the other waits for the disk to write
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="offload-fetch")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-write")
        self._dropped: Future[None] | None = None
        weakref.finalize(self, _close, self._fd, self._reader, self._writer)
        _files.add(self)

    def allocate(self, like: Tensor) -> Place:
        """Room for a tensor like a dense one; what is in it is not defined.

        Raises:
            OffloadError: the disk is full.
        """
        nbytes = -(-like.numel() * like.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE
        take_room(self._fd, self.folder, self._end, nbytes, room_of(self._fd))
        try:
            if self._window is None or self._end + nbytes > self._window[0] + len(self._window[1]):
                self._window = self._end, mapped(self._fd, self._end, nbytes)
        except OSError as error:
            raise OffloadError(refusal(self.folder, error, self._end + nbytes)) from error
        begin, memory = self._window
        start = self._end - begin
        address = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=1).data_ptr()
        self._pages[address] = Pages(address, self._end, nbytes)
        self._end += nbytes
        return Place(self._pages[address], memory, start)

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor's values in the file; one that is small or not dense is given back as it is."""
        if not can_move(tensor):
            return tensor
        home = self.allocate(tensor).tensor(tensor)
        home.copy_(tensor)
        self.drop([home])
        return home

    def pages(self, tensors: Iterable[Tensor]) -> list[Pages]:
        """Where those of the tensors lie that begin in this file."""
        plain = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.device.type == "cpu"]
        return [self._pages[where] for tensor in plain if (where := tensor.data_ptr()) in self._pages]

    def fetch(self, pages: Iterable[Pages]) -> Future[None]:
        """Reads pages that are not in memory; the future raises an :class:`OffloadError` if the disk fails."""
        return self._reader.submit(self._fetch, list(pages))

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Gives the memory of tensors back; they can still be used."""
        self.drop_pages(self.pages(tensors))

    def drop_pages(self, pages: Iterable[Pages]) -> None:
        """The same for pages."""
        pages = list(pages)
        for each in pages:
            _libc.madvise(each.address, each.nbytes, _DO_NOT_NEED)
        if pages:
            self._dropped = self._writer.submit(_evict, self._fd, pages)

    def drop_all(self) -> None:
        """The same for all tensors."""
        self.drop_pages(self._pages.values())

    def wait(self) -> None:
        """Waits until what was given back is on the disk."""
        if self._dropped is not None:
            self._dropped.result()

    def _fetch(self, pages: list[Pages]) -> None:
        for each in pages:
            if _libc.madvise(each.address, each.nbytes, _POPULATE_READ) == 0:
                continue
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # an older kernel
                _libc.madvise(each.address, each.nbytes, _WILL_NEED)
            elif code not in (errno.EAGAIN, errno.EINTR):
                raise OffloadError(refusal(self.folder, OSError(errno.EIO, os.strerror(errno.EIO))))


_files: weakref.WeakSet[PageFile] = weakref.WeakSet()


def can_move(tensor: Tensor) -> bool:
    """Whether a tensor is worth moving to a file, and can be: it is dense and in host memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() * tensor.element_size() >= WORTHWHILE
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )


def trim() -> None:
    """Hands memory that the C library holds on to, behind tensors that were moved, back to the system."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Gives back the memory of tensors that lie in a file, behind their use; nothing happens to others."""
    tensors = list(tensors)
    for file in list(_files):
        file.drop(tensors)


def _evict(fd: int, pages: list[Pages]) -> None:
    for each in pages:
        os.posix_fadvise(fd, each.offset, each.nbytes, os.POSIX_FADV_DONTNEED)


def _close(fd: int, *pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        pool.shutdown(wait=True)
    os.close(fd)
