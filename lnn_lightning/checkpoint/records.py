"""Reading slices of a checkpoint's records where they lie: files are mapped, and only what is wanted is touched.

A record is what ``torch.save`` writes of one tensor: a zip file, not compressed. torch's own reader takes the whole
record into memory, twice, to give a slice of it. Here the bytes are copied straight to where they belong, and no pickle
is looked at.
"""

from __future__ import annotations

import math
import mmap
import os
import zipfile
from collections.abc import Sequence
from io import BufferedIOBase, FileIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lnn_lightning.checkpoint.errors import CheckpointError

_LOCAL_HEADER = 30
"""Bytes of a zip entry's header before its name."""
_MOST_AT_ONCE = 1 << 30
"""Bytes that one call reads; Linux reads 2 GiB at most."""


def read_items(folder: Path, metadata: Metadata, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
    """Fills the tensors of a load plan.

    Raises:
        CheckpointError: a record is not what the index says.
    """
    by_file: dict[str, list[ReadItem]] = {}
    for item in plan.items:
        by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    for name, items in by_file.items():
        if Path(name).name != name:
            raise CheckpointError(f"The index of {folder} names the file {name}, which is not in it: refused.")
        with open(folder / name, "rb", buffering=0) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # ends with the last tensor that looks at it
            raw = torch.frombuffer(mapped, dtype=torch.uint8)
            for item in items:
                _read(file, raw, folder / name, metadata, item, planner)
                mapped.madvise(mmap.MADV_DONTNEED)  # what was looked at need not stay in memory
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _read(file: FileIO, raw: Tensor, path: Path, metadata: Metadata, item: ReadItem, planner: LoadPlanner) -> None:
    info = metadata.storage_data[item.storage_index]
    entry = metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    sizes, dtype = _chunk(entry, item.storage_index).sizes, entry.properties.dtype
    target, offsets = planner.resolve_tensor(item), item.storage_offsets
    count = math.prod(sizes) * dtype.itemsize
    start = info.offset + _data_offset(raw, info.offset, info.length, count, path)
    rows = bool(sizes) and target.shape[1:] == sizes[1:] and target.dtype == dtype
    if rows and target.is_cpu and target.is_contiguous() and target.numel() > 0:
        _read_into(file, start + offsets[0] * (count // sizes[0]), target, path)
    else:
        copy_slice(raw[start : start + count], sizes, dtype, offsets, target)
    planner.commit_tensor(item, target)


def _read_into(file: FileIO, start: int, target: Tensor, path: Path) -> None:
    """Fills a contiguous tensor with the bytes from some place on."""
    left = memoryview(target.detach().view(torch.uint8).view(-1).numpy().data)
    while left:
        count = os.preadv(file.fileno(), [left[:_MOST_AT_ONCE]], start)
        if count == 0:
            raise CheckpointError(f"{path} is damaged: it is shorter than the index says.")
        left, start = left[count:], start + count


def _chunk(entry: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    if index.index is not None and entry.chunks[index.index].offsets == index.offset:
        return entry.chunks[index.index]
    return next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)


def _data_offset(raw: Tensor, offset: int, length: int, count: int, file: Path) -> int:
    """Where the elements lie in a record."""
    if offset < 0 or length < 0 or offset + length > raw.numel():
        raise CheckpointError(f"{file} is damaged: it is shorter than the index says.")
    record = _Window(raw[offset : offset + length])
    try:
        with zipfile.ZipFile(record) as archive:
            entries = [each for each in archive.infolist() if "/data/" in each.filename]
        if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED or entries[0].file_size != count:
            raise zipfile.BadZipFile("it is no record of one tensor of that size")
        header = record.span(entries[0].header_offset, _LOCAL_HEADER)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise CheckpointError(f"{file} is damaged at byte {offset}: {error}") from error
    start = entries[0].header_offset + _LOCAL_HEADER
    start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if start + count > length:
        raise CheckpointError(f"{file} is damaged at byte {offset}: a record ends too early.")
    return start


def copy_slice(raw: Tensor, sizes: Sequence[int], dtype: torch.dtype, offsets: Sequence[int], target: Tensor) -> None:
    """Copies a slice of a contiguous tensor that is given as bytes, which need not be aligned.

    Args:
        raw: its bytes.
        sizes: its shape.
        dtype: of its elements.
        offsets: where the slice begins.
        target: is filled; its shape is that of the slice.
    """
    if target.numel() == 0:
        return
    if not sizes:
        target.copy_(raw.clone().view(dtype).view(()))
        return
    part = raw.view(*sizes[:-1], sizes[-1] * dtype.itemsize)
    for dim, (offset, length) in enumerate(zip(offsets, target.shape, strict=True)):
        scale = dtype.itemsize if dim == len(sizes) - 1 else 1
        part = part.narrow(dim, offset * scale, length * scale)
    if target.dtype == dtype and target.stride(-1) == 1:
        target.view(torch.uint8).copy_(part)
    else:
        target.copy_(part.clone(memory_format=torch.contiguous_format).view(dtype))


class _Window(BufferedIOBase):
    """Some bytes as a file that can be read."""

    def __init__(self, raw: Tensor) -> None:
        self._raw, self._at = raw, 0

    def span(self, start: int, count: int) -> bytes:
        return self._raw[start : start + count].numpy().tobytes()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._raw.numel())[whence]
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._raw.numel() if size is None or size < 0 else self._at + size
        found = self.span(self._at, max(end - self._at, 0))
        self._at += len(found)
        return found
