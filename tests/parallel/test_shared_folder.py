"""Folders that some ranks do not see: a rank becomes a host by a mount namespace with a disk of its own."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from lnn_lightning.checkpoint import CheckpointError
from lnn_lightning.parallel import shared_folder
from lnn_lightning.parallel.shared_folder import check_same_found, check_seen, check_shared
from tests.helpers.hosts import need_namespaces
from tests.helpers.ranks import run_ranks

CLONE_NEWNS = 0x20000


def become_a_host(private: Path | None = None) -> None:
    """A mount namespace of this process's own; over `private` a disk that only it sees."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if private is not None:
        subprocess.run(["mount", "-t", "tmpfs", "none", str(private)], check=True)


def error_of(check: Callable[[], None]) -> str:
    try:
        check()
    except CheckpointError as error:
        return str(error)
    return ""


def _three_hosts(rank: int, world_size: int, folder: Path) -> list[str]:
    """Ranks 0 and 1 on hosts that share the folder, 2 and 3 on their own."""
    shared_folder.PATIENCE = 0.5
    private, shared = folder / "private", folder / "shared"
    if rank > 0:
        become_a_host(private if rank > 1 else None)
    found = [error_of(lambda: check_shared(private)), error_of(lambda: check_shared(shared / "new"))]
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    found.append(error_of(lambda: check_shared(private, half[rank // 2])))
    if rank == 0:
        (shared / "one.ckpt").write_text("one")
        (private / "two.ckpt").write_text("two")
    dist.barrier()
    found.append(error_of(lambda: check_seen(shared / "one.ckpt")))
    found.append(error_of(lambda: check_seen(shared / "none.ckpt")))
    found.append(error_of(lambda: check_seen(private / "two.ckpt")))
    if rank > 1:
        (private / "two.ckpt").write_text("two" if rank == 2 else "Two")
    found.append(error_of(lambda: check_seen(private / "two.ckpt")))
    if rank == 3:
        (private / "two.ckpt").write_text("two")
    found.append(error_of(lambda: check_seen(private / "two.ckpt")))
    found.append(error_of(lambda: check_same_found(lambda: [str(path) for path in shared.iterdir()])))
    found.append(error_of(lambda: check_same_found(lambda: ["a", "b"] if rank == 3 else ["a"])))
    return found


@pytest.mark.slow
def test_hosts_that_do_not_share(tmp_path: Path) -> None:
    need_namespaces()
    (tmp_path / "private").mkdir()
    (tmp_path / "shared").mkdir()
    ranks = run_ranks(_three_hosts, 4, tmp_path)
    name = os.uname().nodename
    private, new, half, one, none, two, changed, copied, same, different = ranks[0]
    assert f"what {name} (rank 0) writes there is not seen on {name} (rank 2), {name} (rank 3)" in private
    assert new == half == one == none == copied == same == ""
    assert f"is there on {name} (rank 0), {name} (rank 1) but not on {name} (rank 2), {name} (rank 3)" in two
    assert f"on {name} (rank 3) is another than" in changed
    assert f"{name} (rank 3): a, b" in different
    assert ranks[1] == ranks[0]
    for rank in ranks[2:]:  # their half does not share the folder either
        assert rank[:2] + rank[3:] == ranks[0][:2] + ranks[0][3:]
        assert f"not seen on {name} (rank 1)" in rank[2]
    assert sorted(path.name for path in (tmp_path / "shared").rglob("*")) == ["new", "one.ckpt"]
    assert [path.name for path in (tmp_path / "private").iterdir()] == ["two.ckpt"]


def _one_host(rank: int, world_size: int, folder: Path) -> list[Path]:
    check_shared(folder / "new")
    check_seen(folder / f"{rank}.ckpt")
    check_same_found(lambda: [str(rank)])
    return list(folder.iterdir())


def test_on_one_host_nothing_is_looked_at(tmp_path: Path) -> None:
    assert run_ranks(_one_host, 2, tmp_path) == [[], []]


def _cannot_write(rank: int, world_size: int, folder: Path) -> str:
    if rank > 0:
        become_a_host()
    return error_of(lambda: check_shared(folder / "file" / "new"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    need_namespaces()
    (tmp_path / "file").write_text("no folder")
    first, second = run_ranks(_cannot_write, 2, tmp_path)
    assert first == second
    assert "(rank 0) cannot write to" in first
    assert "NotADirectoryError" in first
