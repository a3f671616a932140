"""safetensors files as the Hugging Face hub has them: one, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lnn_lightning.checkpoint.errors import CheckpointError
from lnn_lightning.checkpoint.filling import fill
from lnn_lightning.checkpoint.pieces import Pieces

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class SafetensorsFiles:
    """A ``.safetensors`` file, or a folder with one, or with shards and their index.

    Args:
        path: the file or folder.

    Raises:
        CheckpointError: a file is missing or damaged, or the index does not fit them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._file: dict[str, Path] = {}
        index = _read_index(path / INDEX) if (path / INDEX).is_file() else None
        for file in _the_file(path) if index is None else dict.fromkeys(path / each for each in index.values()):
            with _opened(file) as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    code = part.get_dtype()
                    if code not in _DTYPES:
                        raise CheckpointError(f"{name!r} in {file} has the dtype {code}, which is not known here.")
                    if index is not None and index.get(name) != file.name:
                        said = f"says it is in {index[name]}" if name in index else "does not have it"
                        raise CheckpointError(f"{name!r} is in {file}, but {INDEX} {said}.")
                    self._known[name] = (tuple(part.get_shape()), _DTYPES[code])
                    self._file[name] = file
        for name, shard in (index or {}).items():
            if name not in self._known:
                raise CheckpointError(f"{path / INDEX} says that {name!r} is in {shard}, which does not have it.")

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, whole shapes and dtypes."""
        return dict(self._known)

    def tied(self) -> dict[str, str]:
        """Files have tied tensors once."""
        return {}

    def read(self, wanted: Mapping[str, Pieces]) -> None:
        """Fills slices in place."""
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self._file[name], []).append(name)
        for file, names in by_file.items():
            with _opened(file) as opened:
                for name in names:
                    fill(wanted[name], opened.get_slice(name).__getitem__)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """There are no checksums."""


def _the_file(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if path / WEIGHTS in files:
        return [path / WEIGHTS]
    if len(files) != 1:
        raise CheckpointError(
            f"{path} has {len(files)} safetensors files and no {INDEX} that says what is in which: name one of them."
        )
    return files


def _read_index(file: Path) -> dict[str, str]:
    try:
        content = json.loads(file.read_text())
        index = content["weight_map"]
        if not all(Path(shard).name == shard for shard in index.values()):
            raise ValueError("a shard is not a file beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no index of safetensors files: {type(error).__name__}: {error}") from error
    return index


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: the weights are not complete.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or no safetensors file: {error}") from error


# ------------------------------------------------------------------------------------------------ writing


def shards_of(known: Mapping[str, tuple[Sequence[int], torch.dtype]], most: int) -> list[list[str]]:
    """Deals tensors, in order, to files of at most so many bytes; one that is larger gets a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (shape, dtype) in known.items():
        size = bytes_of(shape, dtype)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_folder(
    folder: Path,
    known: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Callable[[list[str]], Iterable[Tensor]],
    max_shard_size: int,
) -> None:
    """Writes weights into an empty folder as the hub has them.

    Args:
        folder: it exists.
        known: names, shapes and dtypes.
        tensors: gives the tensors of these names, one after the other.
        max_shard_size: bytes of a file.
    """
    shards = shards_of(known, max_shard_size)
    if len(shards) == 1:
        write_file(folder / WEIGHTS, known, tensors)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(file, {name: known[name] for name in names}, tensors)
        weight_map |= dict.fromkeys(names, file.name)
    total = sum(bytes_of(shape, dtype) for shape, dtype in known.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_file(
    path: Path,
    known: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Callable[[list[str]], Iterable[Tensor]],
) -> None:
    """Writes one safetensors file, tensor by tensor: the library's own writer wants all of them in memory.

    Raises:
        CheckpointError: a dtype that these files do not have.
    """
    names = sorted(known, key=lambda name: (-known[name][1].itemsize, name))  # keeps all of them aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype = known[name]
        if dtype not in _CODES:
            raise CheckpointError(f"{name!r} is {dtype}, which safetensors files do not have.")
        start, end = end, end + bytes_of(shape, dtype)
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors(names):
            write_bytes(file, tensor)


def write_bytes(file: IO[bytes], tensor: Tensor) -> memoryview:
    """Writes the elements of a tensor in order, and returns what it wrote."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    file.write(data)
    return data


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Size of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
