"""A checkpoint as a folder: tensors by ``torch.distributed.checkpoint``, everything else in ``meta.pt``.

Each rank writes what it holds, under the user's names; a tensor that several ranks hold is written once. Nothing is
ever unpickled freely: tensors and ``meta.pt`` load with ``weights_only=True``, and the index of the folder through an
unpickler that knows a handful of plain data classes.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

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


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or not one of ours."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(f"The index of the checkpoint names {module}.{name}, which no checkpoint needs: refused.")


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / _INDEX, "rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}/{_INDEX} is no index of a checkpoint.")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def is_distributed_checkpoint(path: str | Path) -> bool:
    """Whether a path is a folder written by :func:`save_checkpoint`."""
    return (Path(path) / _META).is_file()


def save_checkpoint(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Writes a checkpoint folder. Collective over all ranks.

    It is written beside its place and renamed when it is complete: one that was there stands until then.

    Args:
        path: the folder.
        tensors: what this rank holds, by name.
        metadata: everything else; rank 0's is written.
    """
    folder = Path(path)
    new, old = folder.with_name(f".{folder.name}.saving"), folder.with_name(f".{folder.name}.replaced")
    if dist.get_rank() == 0:
        for leftover in (new, old):
            _remove(leftover)
        new.mkdir(parents=True)
    dist.barrier()
    dcp.save(dict(tensors), storage_writer=FileSystemWriter(new))
    if dist.get_rank() == 0:
        torch.save(dict(metadata), new / _META)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        _remove(old)
    dist.barrier()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load_metadata(path: str | Path) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors.

    Raises:
        CheckpointError: it holds objects that only a pickle could bring back, or is no checkpoint.
    """
    file = Path(path) / _META
    if not file.is_file():
        raise CheckpointError(f"{path} is no checkpoint folder of lnn_lightning: it has no {_META}.")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds an object that cannot be loaded safely: {error} Save plain values (numbers, strings, lists, "
            "dicts, tensors) as hyper-parameters and in `on_save_checkpoint`."
        ) from error


def tensor_names(path: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of the tensors in a checkpoint."""
    entries = _SafeReader(path).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(path: str | Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads some tensors of a checkpoint into CPU memory; every rank reads what it asks for.

    Raises:
        CheckpointError: the checkpoint does not have one of them.
    """
    known = tensor_names(path)
    wanted = list(names)
    if missing := [name for name in wanted if name not in known]:
        raise CheckpointError(f"{path} has no {missing[0]!r} ({len(missing)} of {len(wanted)} tensors are missing).")
    tensors = {name: torch.empty(known[name][0], dtype=known[name][1]) for name in wanted}
    if tensors:
        with warnings.catch_warnings():  # torch remarks that this process reads by itself
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=_SafeReader(path), no_dist=True)
    return tensors


def load_full_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The whole ``state_dict`` of the module in a checkpoint, without any process group."""
    prefix = "state_dict."
    names = [name for name in tensor_names(path) if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensor for name, tensor in load_tensors(path, names).items()}
