"""Folders that are replaced and removed as a whole: whatever dies in between, a complete one is there."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def beside(folder: Path) -> Path:
    """Where the next version of a folder is written."""
    return folder.with_name(f".{folder.name}.saving")


def _aside(folder: Path) -> Path:
    """Where an old version waits for its removal."""
    return folder.with_name(f".{folder.name}.replaced")


def put_in_place(folder: Path) -> None:
    """Moves the version that was written beside a folder to its place; the old one stands until then."""
    new, old = beside(folder), _aside(folder)
    remove(old)
    if not folder.is_symlink() and folder.is_dir() and _exchange(new, folder):
        new.rename(old)
    else:
        if folder.exists() or folder.is_symlink():
            folder.rename(old)
        new.rename(folder)
    sync_folder(folder.parent)
    remove(old)


def repair(folder: Path) -> bool:
    """Brings back a folder whose replacement was cut off, where the file system cannot exchange two in one move.

    Returns:
        Whether it had to be brought back.
    """
    if folder.exists() or folder.is_symlink() or not _aside(folder).is_dir():
        return False
    _aside(folder).rename(folder)
    return True


def repair_all(parent: Path) -> list[Path]:
    """Brings back all folders in one whose replacement was cut off; which."""
    aside = _aside(parent / "*").name
    names = [each.name[1 : -len(aside[2:])] for each in parent.glob(aside)]
    return [parent / name for name in names if repair(parent / name)]


def remove(path: Path) -> None:
    """Removes a folder, file or link; under its name it is gone at once, never half there."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        going = path.with_name(f".{path.name.strip('.')}.removed")
        if going.exists():
            shutil.rmtree(going)
        path.rename(going)
        shutil.rmtree(going)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has a folder's list of names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one move (Linux); False where the system or the file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0
