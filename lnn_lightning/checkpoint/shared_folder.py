"""One folder for all hosts: a checkpoint is written and read by every rank, so every host must see the same one.

On one host nothing is looked at. Network file systems may show a new file to other hosts late (attribute caches): a
host that does not see it looks again for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lnn_lightning.checkpoint.errors import CheckpointError
from lnn_lightning.parallel.hosts import Host, hosts_in_words, hosts_of

PATIENCE = 20.0
"""Seconds a host looks for what another has written."""

_LOOK_EVERY = 0.2
_TAIL = 1 << 16
_shared: set[tuple[str, tuple[int, ...]]] = set()


def check_shared(folder: str | Path, group: ProcessGroup | None = None, patience: float | None = None) -> None:
    """Makes sure that all hosts see one and the same folder; each folder is looked at once. Collective over the group.

    The first rank writes a small file with a random name, and all look for it.

    Args:
        folder: where checkpoints will be written; the same text on all ranks. It is made if it is not there.
        group: ranks that will write, None for all.
        patience: seconds a host goes on looking; None: :data:`PATIENCE`.

    Raises:
        CheckpointError: on all ranks; names the hosts that do not see the folder, or says why it cannot be written.
    """
    key = (str(folder), tuple(dist.get_process_group_ranks(group)))
    if key in _shared:
        return
    hosts = hosts_of(group)
    if len(set(hosts)) > 1:
        rank = dist.get_rank(group)
        token = _write_token(Path(folder)) if rank == 0 else None
        name, problem = _from_first(token, group)
        if problem is not None:
            raise CheckpointError(f"{hosts[0].name} (rank 0) cannot write to {folder}: {problem}")
        try:
            seen = _look_for(Path(folder) / name, PATIENCE if patience is None else patience)
            views = _gather(seen, group)
        finally:
            if rank == 0:
                with contextlib.suppress(OSError):
                    (Path(folder) / name).unlink()
        if blind := [other for other, sees in enumerate(views) if not sees]:
            raise CheckpointError(
                f"The checkpoint folder {folder} is not shared by all hosts: what {hosts[0].name} (rank 0) writes "
                f"there is not seen on {hosts_in_words(hosts, blind)}. Every rank writes its part of a checkpoint "
                "into one folder: put it on a file system that all hosts mount, by `Trainer(default_root_dir=...)` or "
                "`ModelCheckpoint(dirpath=...)`. Nothing was saved."
            )
    _shared.add(key)


def check_seen(path: str | Path, group: ProcessGroup | None = None, patience: float | None = None) -> None:
    """Makes sure that all hosts see the same checkpoint, if any does. Collective over the group.

    Args:
        path: a checkpoint folder or file; the same text on all ranks. Copies on disks of their own will do.
        group: ranks that will read, None for all.
        patience: seconds to go on looking while some do not see it; None: :data:`PATIENCE`.

    Raises:
        CheckpointError: on all ranks; names the hosts that do not see it, or see another.
    """
    hosts = hosts_of(group)
    if len(set(hosts)) == 1:
        return
    speaker = hosts.index(Host.here()) == dist.get_rank(group)  # one rank a host reads for all of its ranks
    marks = _until_equal(lambda: _mark(Path(path)) if speaker else None, hosts, group, patience)
    with_it = [rank for rank, mark in enumerate(marks) if mark]
    if with_it and (without := [rank for rank, mark in enumerate(marks) if not mark]):
        raise CheckpointError(
            f"The checkpoint {path} is there on {hosts_in_words(hosts, with_it)} but not on "
            f"{hosts_in_words(hosts, without)}. Every rank reads its part of it: put it on a file system that "
            "all hosts mount, or copy it to each."
        )
    if len(set(marks)) > 1:
        other = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise CheckpointError(
            f"{path} is not the same checkpoint on all hosts: on {hosts_in_words(hosts, other)} is another than on "
            f"{hosts[0].name} (rank 0), or it was being written. Use one that all hosts share, or remove the old "
            "copies."
        )


def check_same_found(
    look: Callable[[], Sequence[str]], group: ProcessGroup | None = None, patience: float | None = None
) -> None:
    """Makes sure that all hosts find the same checkpoints to go on from. Collective over the group.

    Args:
        look: finds the paths of the checkpoints on this host.
        group: ranks that go on, None for all.
        patience: seconds to go on looking while hosts find different ones; None: :data:`PATIENCE`.

    Raises:
        CheckpointError: on all ranks; says which hosts find what.
    """
    hosts = hosts_of(group)
    if len(set(hosts)) == 1:
        return
    found = _until_equal(lambda: tuple(sorted(look())), hosts, group, patience)
    if len(set(found)) > 1:
        by_view: dict[tuple[str, ...], list[int]] = {}
        for rank, paths in enumerate(found):
            by_view.setdefault(paths, []).append(rank)
        views = "; ".join(
            f"{hosts_in_words(hosts, ranks)}: {', '.join(paths) if paths else 'none'}"
            for paths, ranks in by_view.items()
        )
        raise CheckpointError(
            f"The hosts do not see the same checkpoints to go on from: {views}. Put them on a file system that all "
            "hosts mount, by `Trainer(default_root_dir=...)` or `ModelCheckpoint(dirpath=...)`, or remove what is left "
            "over."
        )


# ---------------------------------------------------------------------------------------------------- looking


def _write_token(folder: Path) -> tuple[str, str | None]:
    """Name of the file written, and what was wrong."""
    name = f".shared-{secrets.token_hex(16)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("Written by lnn_lightning to see whether all hosts share this folder. Remove it.\n")
    except OSError as error:
        return name, f"{type(error).__name__}: {error}"
    return name, None


def _look_for(path: Path, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system ask its server again
    return True


def _until_equal(
    look: Callable[[], Any], hosts: Sequence[Host], group: ProcessGroup | None, patience: float | None
) -> list[Any]:
    """What each rank's host sees, looked at again until all see the same or the patience ends."""
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    while True:
        told = _gather((look(), time.monotonic() > deadline), group)
        views = [told[hosts.index(host)][0] for host in hosts]
        if len(set(views)) == 1 or told[0][1]:
            return views
        time.sleep(_LOOK_EVERY)


def _mark(path: Path) -> str:
    """Differs for two checkpoints: by names, sizes and last bytes of the files. Empty if there is none."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
        for file in files:
            with open(file, "rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - _TAIL))
                digest.update(f"{file.name}\0{size}\0".encode())
                digest.update(stream.read())
    except OSError:
        return ""
    return digest.hexdigest()


def _gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _from_first(value: Any, group: ProcessGroup | None) -> Any:
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
