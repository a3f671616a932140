"""Files of this process on a disk that is offloaded to: made, enlarged, mapped, and what is said if that fails."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from pathlib import Path
from typing import Any

from lnn_lightning.memory.offload.settings import OffloadError

WINDOW = 1 << 28
"""Bytes of a file that are mapped at a time, or more: each mapping takes one of the process's open files."""


def new_file(folder: str | Path, kind: str) -> tuple[Path, Path, int]:
    """Makes a file that nobody else uses; whoever asked for it takes its name away.

    Args:
        folder: an existing folder.
        kind: begin of its name.

    Returns:
        The folder, the file, and its descriptor.

    Raises:
        OffloadError: the folder does not exist or cannot be written to.
    """
    folder = Path(folder).expanduser()
    path = folder / f"{kind}-{os.getpid()}-{uuid.uuid4().hex}.bin"
    try:
        return folder, path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OffloadError(refusal(folder, error)) from error


def room_of(fd: int) -> int:
    """Bytes that the disk of a file has left."""
    disk = os.statvfs(fd)
    return disk.f_bavail * disk.f_frsize


def take_room(fd: int, folder: Path, begin: int, nbytes: int, room: int) -> None:
    """Takes room on the disk for a part of a file.

    Args:
        fd: the file.
        folder: where it is.
        begin: of the part.
        nbytes: its length.
        room: bytes that the disk has left.

    Raises:
        OffloadError: the disk is full.
    """
    try:
        if nbytes > room:  # else it would be filled up before it refuses
            raise OSError(errno.ENOSPC, "no room")
        os.posix_fallocate(fd, begin, nbytes)
    except OSError as error:
        raise OffloadError(refusal(folder, error, begin + nbytes)) from error


def mapped(fd: int, start: int, nbytes: int) -> mmap.mmap:
    """A part of a file in memory, with what comes behind it, be it there yet or not, up to :data:`WINDOW`."""
    nbytes = max(nbytes, WINDOW)
    if os.fstat(fd).st_size < start + nbytes:
        os.ftruncate(fd, start + nbytes)  # takes no room on the disk
    return mmap.mmap(fd, nbytes, offset=start)


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def refusal(folder: Path, error: OSError, need: int | None = None) -> str:
    """What to tell the user about an error of the folder."""
    what: dict[Any, str] = {
        errno.ENOENT: "it does not exist on this host. Make it, or set another `target`.",
        errno.ENOTDIR: "it is no folder. Set another `target`.",
        errno.EACCES: "this user may not write to it. Set another `target`.",
        errno.EROFS: "it is on a read-only file system. Set another `target`.",
        errno.ENOSPC: "its disk is full"
        + (f" ({_amount(need)} are needed for this rank)" if need is not None else "")
        + ". Make room, or set another `target`.",
    }
    return f"Offloading to {str(folder)!r} failed: " + what.get(error.errno, f"{error.strerror or error}.")
