"""Tensors whose memory is a file."""

import errno
import os
from pathlib import Path

import pytest
import torch

from lnn_lightning.memory.offload.pages import WORTHWHILE, PageFile, give_back
from lnn_lightning.memory.offload.settings import OffloadError


def in_memory() -> int:
    """Bytes of files that this process has in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            ours = "/pages-" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_values_stay_and_memory_goes(tmp_path: Path) -> None:
    file = PageFile(tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, however the process ends
    values = torch.randn(64, 1024)
    moved = file.moved(values)
    assert in_memory() == 0
    file.fetch(file.pages([moved])).result()
    assert in_memory() == values.numel() * 4
    moved[3] += 1  # written through the mapping, given back before it is on the disk
    give_back([moved, values])
    assert in_memory() == 0
    file.wait()
    values[3] += 1
    assert torch.equal(moved, values)


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "bfloat16"])
def test_layout_and_dtype_stay(kind: str, tmp_path: Path) -> None:
    made = {
        "transposed": lambda: torch.randn(128, 64).t(),
        "channels_last": lambda: torch.randn(8, 16, 16, 16).to(memory_format=torch.channels_last),
        "bfloat16": lambda: torch.randn(128, 64).bfloat16(),
    }[kind]()
    moved = PageFile(tmp_path).moved(made)
    assert moved is not made and torch.equal(moved, made) and moved.stride() == made.stride()


def test_what_is_small_or_not_dense_stays(tmp_path: Path) -> None:
    file = PageFile(tmp_path)
    small = torch.randn(WORTHWHILE // 4 - 1)
    spread = torch.randn(128, 128)[:, ::2]
    assert file.moved(small) is small and file.moved(spread) is spread


def test_it_outlives_its_file(tmp_path: Path) -> None:
    file = PageFile(tmp_path)
    moved = file.moved(torch.arange(8192.0))
    del file
    assert moved.sum() == 8191 * 4096


def test_a_disk_that_fails_is_an_error(tmp_path: Path) -> None:
    file = PageFile(tmp_path)
    moved = file.moved(torch.randn(8192))
    file.wait()
    os.ftruncate(file._fd, 0)  # touching a page now would kill the process
    with pytest.raises(OffloadError, match=f"Offloading to '{tmp_path}' failed"):
        file.fetch(file.pages([moved])).result()


def test_a_full_disk_and_a_missing_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OffloadError, match="does not exist on this host"):
        PageFile(tmp_path / "missing")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = PageFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match="disk is full .* are needed for this rank"):
        file.moved(torch.randn(8192))
