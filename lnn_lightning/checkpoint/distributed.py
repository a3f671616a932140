"""A checkpoint as a folder: tensors by ``torch.distributed.checkpoint``, everything else in ``meta.pt``.

Each rank writes the slices it holds, under the user's names; a slice that several ranks hold is written once. Nothing
is ever unpickled freely: tensors and ``meta.pt`` load with ``weights_only=True``, and the index of the folder through
an unpickler that knows a handful of plain data classes.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lnn_lightning.checkpoint.errors import CheckpointError
from lnn_lightning.checkpoint.folder import beside, put_in_place, remove, sync_folder
from lnn_lightning.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    SummingFileSystem,
    read_manifest,
    sum_of_file,
    write_manifest,
)
from lnn_lightning.checkpoint.pieces import Pieces, whole_tensor
from lnn_lightning.checkpoint.records import read_items
from lnn_lightning.checkpoint.safe import values_allowed
from lnn_lightning.checkpoint.states import OURS, whole_state

_INDEX = ".metadata"
_META = "meta.pt"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib", "PurePosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"The index of the checkpoint names {module}.{name}, which no checkpoint needs: refused.")


class _SafeReader(FileSystemReader):
    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is not None:
            return self._metadata
        file = Path(self.path) / _INDEX
        try:
            with open(file, "rb") as stream:
                metadata = _IndexUnpickler(stream).load()
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing: the checkpoint is not complete.") from error
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{file} is no index of a checkpoint.")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        self._metadata = metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if (Path(self.path) / MANIFEST).is_file():
            return read_items(Path(self.path), self.read_metadata(), plan, planner)
        return super().read_data(plan, planner)  # the first format


class _Saving(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index.offset).contiguous()  # as `read_items` wants it


class _Loading(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index.offset)


def is_distributed_checkpoint(path: str | Path) -> bool:
    """Whether a path is a folder written by :func:`save_checkpoint`, complete or not."""
    return any((Path(path) / name).is_file() for name in (_META, MANIFEST, _INDEX))


def packed(metadata: Mapping[str, Any]) -> bytes:
    """The part of a checkpoint that is not tensors as it will be stored, from now on independent of its objects.

    Raises:
        CheckpointError: it holds objects that only a pickle could bring back.
    """
    buffer = io.BytesIO()
    torch.save(dict(metadata), buffer)
    buffer.seek(0)
    _unpacked(buffer, "The checkpoint")
    return buffer.getvalue()


def save_checkpoint(
    path: str | Path,
    tensors: Mapping[str, Tensor | Pieces],
    metadata: Mapping[str, Any] | bytes,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint folder. Collective over the ranks of the group.

    It is written beside its place, brought to the disk, and moved to its place when it is complete: one that was there
    stands until then.

    Args:
        path: the folder.
        tensors: what this rank holds, by name.
        metadata: everything else, or what :func:`packed` made of it; rank 0's is written.
        group: ranks that write, with a backend for tensors on the CPU; None: all.

    Raises:
        CheckpointError: some rank could not write, or the path is a folder of other files; what was at the path is
            untouched.
    """
    folder = Path(path)
    new = beside(folder)
    first = dist.get_rank(group) == 0
    writer = FileSystemWriter(new)
    writer.fs = SummingFileSystem()

    def start() -> None:
        if first and folder.is_dir() and any(folder.iterdir()) and not is_distributed_checkpoint(folder):
            raise FileExistsError(f"{folder} is a folder of other files. Give the checkpoint a name of its own in it.")
        if first:
            remove(new)
            new.mkdir(parents=True)

    def write_meta() -> None:
        if first:
            with open(new / _META, "wb") as file:
                file.write(metadata if isinstance(metadata, bytes) else packed(metadata))
                file.flush()
                os.fsync(file.fileno())

    def finish(records: list[dict[str, FileRecord]]) -> None:
        if first:
            files = {name: record for each in records for name, record in each.items()}
            write_manifest(new, {**files, _META: sum_of_file(new / _META)})
            sync_folder(new)
            put_in_place(folder)

    try:
        together(start, folder, group)
        entries = {name: whole_tensor(each) if isinstance(each, Tensor) else each for name, each in tensors.items()}
        try:
            planner = _Saving(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.save(entries, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(_not_written(folder, rank, cause)) from error
        together(write_meta, folder, group)
        records: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(records, writer.fs.records, group=group)
        together(lambda: finish(records), folder, group)
    except CheckpointError:
        if first:
            try:
                remove(new)
            except OSError:  # the disk is gone; the next save tries again
                pass
        raise


def together(act: Callable[[], None], folder: Path, group: dist.ProcessGroup | None) -> None:
    """A part of saving on all ranks: if it fails on one, all of them raise.

    Raises:
        CheckpointError: names the rank and what it says.
    """
    failure = None
    try:
        act()
    except (OSError, RuntimeError) as error:
        failure = f"{type(error).__name__}: {error}"
    failures: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointError(_not_written(folder, rank, text))


def _not_written(folder: Path, rank: int, cause: Any) -> str:
    text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    return (
        f"The checkpoint {folder} could not be written. Rank {rank} says: {text}\n"
        "Checkpoints that were complete before are untouched."
    )


def load_metadata(path: str | Path) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors.

    Raises:
        CheckpointError: it holds objects that only a pickle could bring back, or is no checkpoint.
    """
    file = Path(path) / _META
    if not file.is_file():
        raise CheckpointError(f"{path} is no checkpoint folder of lnn_lightning: it has no {_META}.")
    metadata = _unpacked(file, str(file))
    if metadata.get(OURS, {}).get("format", 1) > 1:  # the first format had no list of its files
        read_manifest(Path(path))
    return metadata


def _unpacked(file: Path | io.BytesIO, name: str) -> dict[str, Any]:
    try:
        with values_allowed():
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} holds an object that cannot be loaded safely: {error} Save plain values (numbers, strings, lists, "
            "dicts, tensors) as hyper-parameters and in `on_save_checkpoint`."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error


def tensor_names(path: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of the tensors in a checkpoint."""
    return _names_in(_SafeReader(path).read_metadata())


def _names_in(index: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_pieces(path: str | Path, wanted: Mapping[str, Pieces]) -> None:
    """Fills slices from a checkpoint, in place; every rank reads what it asks for and nothing else.

    Raises:
        CheckpointError: the checkpoint does not have one of them, or in another shape.
    """
    if not wanted:
        return
    reader = _SafeReader(path)
    known = _names_in(reader.read_metadata())
    for name, pieces in wanted.items():
        if name not in known:
            missing = sum(each not in known for each in wanted)
            raise CheckpointError(f"{path} has no {name!r} ({missing} of {len(wanted)} tensors are missing).")
        if known[name][0] != pieces.shape:
            raise CheckpointError(f"{name!r} has the shape {known[name][0]} in {path} and {pieces.shape} here.")
    with warnings.catch_warnings():  # torch remarks that this process reads by itself
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            planner = _Loading(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(dict(wanted), storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise CheckpointError(f"{path} cannot be read: {type(cause).__name__}: {cause}") from error


def load_tensors(path: str | Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads some tensors of a checkpoint, whole, into CPU memory; every rank reads what it asks for.

    Raises:
        CheckpointError: the checkpoint does not have one of them.
    """
    known = tensor_names(path)
    wanted = list(names)
    if missing := [name for name in wanted if name not in known]:
        raise CheckpointError(f"{path} has no {missing[0]!r} ({len(missing)} of {len(wanted)} tensors are missing).")
    tensors = {name: torch.empty(known[name][0], dtype=known[name][1]) for name in wanted}
    read_pieces(path, {name: whole_tensor(tensor) for name, tensor in tensors.items()})
    return tensors


def load_full_state_dict(path: str | Path) -> dict[str, Any]:
    """The whole ``state_dict`` of the module in a checkpoint, without any process group."""
    names = [name for name in tensor_names(path) if name.startswith("state_dict.")]
    ours = load_metadata(path).get(OURS, {})
    return whole_state({**load_tensors(path, names), **ours.get("values", {})}, "state_dict", ours)
