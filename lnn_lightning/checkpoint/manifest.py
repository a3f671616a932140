"""The list of a checkpoint's files with sizes and checksums: written last, looked at before anything is loaded.

A folder without it was never finished. The checksums (CRC-32) find what disks, copies and people did to a file by
accident; nothing is trusted because of them: loading never unpickles, whatever the files hold.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from lnn_lightning.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        bytes: its size.
        crc32: checksum of what it holds, 8 hexadecimal digits.
    """

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    Attributes:
        saved: when it was complete, in seconds since 1970.
        files: its files by name.
    """

    saved: float
    files: dict[str, FileRecord]


class _Summing(RawIOBase):
    """Passes on what is written to a file and keeps its checksum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.size, self.crc = stream, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self._stream.flush()
        return self._stream.fileno()


class SummingFileSystem(FileSystem):
    """The file system of a checkpoint writer: records of all files that were written through it."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Opens a file; what is written is summed up."""
        with open(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summing = _Summing(cast(IO[bytes], stream))
            yield summing
            self.records[Path(path).name] = FileRecord(summing.size, f"{summing.crc:08x}")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Renames a file, and its record."""
        super().rename(path, new_path)
        if (record := self.records.pop(Path(path).name, None)) is not None:
            self.records[Path(new_path).name] = record


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Completes a checkpoint folder. On the disk when this returns."""
    listed = {name: asdict(record) for name, record in sorted(files.items())}
    text = json.dumps({"saved": time.time(), "checksum_of_files": _sum_of(listed), "files": listed}, indent=1)
    with open(folder / MANIFEST, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it was changed.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
        files = {str(name): FileRecord(**record) for name, record in raw["files"].items()}
        intact = raw["checksum_of_files"] == _sum_of(raw["files"])
        saved = float(raw["saved"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: it is no list of files ({error}).") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: it was changed after the checkpoint was written.")
    return Manifest(saved, files)


def verify(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compares a checkpoint's files with its manifest: all sizes, and the checksums of a share of the bytes.

    Args:
        folder: the checkpoint.
        share: which part of the files to read.
        shares: in how many parts the files are read.

    Raises:
        CheckpointError: names the first file that is not as it was written.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        file = folder / name
        if "/" in name or not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is not complete.")
        if (size := file.stat().st_size) != record.bytes:
            raise CheckpointError(f"{file} is damaged: it has {size} bytes and was written with {record.bytes}.")
    for name in _dealt(manifest.files, shares)[share]:
        if sum_of_file(folder / name).crc32 != manifest.files[name].crc32:
            raise CheckpointError(f"{folder / name} is damaged: its checksum is not that of what was written.")


def sum_of_file(path: Path) -> FileRecord:
    """Size and checksum of a file, read block by block."""
    size, crc, block = 0, 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc, size = zlib.crc32(block[:count], crc), size + count
    return FileRecord(size, f"{crc:08x}")


def _dealt(files: Mapping[str, FileRecord], shares: int) -> list[list[str]]:
    """Files in shares of about equal size."""
    dealt: list[list[str]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for name in sorted(files, key=lambda each: (-files[each].bytes, each)):
        least = loads.index(min(loads))
        dealt[least].append(name)
        loads[least] += files[name].bytes
    return dealt


def _sum_of(listed: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(listed, sort_keys=True).encode()):08x}"


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """Complete checkpoints among some folders, by the time at which they were saved."""
    found = []
    for folder in folders:
        try:
            found.append((read_manifest(folder).saved, folder))
        except (CheckpointError, OSError):
            continue
    return [folder for _, folder in sorted(found, reverse=True)]
