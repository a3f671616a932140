"""Whatever tensors can be read from, slice by slice: a folder of this package, a file of torch, safetensors.

Nothing is ever unpickled: files of torch load with ``weights_only=True``, and what holds more than tensors and plain
values is refused.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lnn_lightning.checkpoint.distributed import (
    is_distributed_checkpoint,
    load_metadata,
    read_pieces,
    tensor_names,
)
from lnn_lightning.checkpoint.errors import CheckpointError
from lnn_lightning.checkpoint.filling import fill
from lnn_lightning.checkpoint.hub import INDEX, SafetensorsFiles
from lnn_lightning.checkpoint.manifest import verify
from lnn_lightning.checkpoint.pieces import Pieces
from lnn_lightning.checkpoint.safe import values_allowed
from lnn_lightning.checkpoint.states import OURS

Known = dict[str, tuple[tuple[int, ...], torch.dtype]]
_STATE = "state_dict."


class Source(Protocol):
    """The tensors of a module, somewhere."""

    @property
    def path(self) -> Path:
        """Where they are."""

    def tensors(self) -> Known:
        """Names, whole shapes and dtypes; reads no data."""

    def tied(self) -> dict[str, str]:
        """Names that stand for the same tensor as an earlier one -> that one."""

    def read(self, wanted: Mapping[str, Pieces]) -> None:
        """Fills slices in place, by name, in their own dtype; reads only these slices."""

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compares a share of the bytes with their checksums, where there are any."""


def open_source(path: str | Path) -> Source:
    """The tensors at a path.

    Args:
        path: a checkpoint folder of this package; a ``.ckpt`` or another file of ``torch.save``; a ``.safetensors``
            file, or a folder of them as the Hugging Face hub has it.

    Raises:
        CheckpointError: there is nothing of the kind, or it is damaged, or only a pickle could bring it back.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"There is nothing at {path}.")
    if path.is_file():
        return SafetensorsFiles(path) if path.suffix == ".safetensors" else TorchFile(path)
    if is_distributed_checkpoint(path):
        return Folder(path)
    if (path / INDEX).is_file() or any(path.glob("*.safetensors")):
        return SafetensorsFiles(path)
    if pickles := sorted(each.name for each in path.glob("*.bin")):
        raise CheckpointError(
            f"{path} has its weights as pickles ({pickles[0]}), which are not loaded: they can run code. Save them "
            "as safetensors (transformers: `model.save_pretrained(folder)`), or name one file of tensors."
        )
    raise CheckpointError(
        f"{path} has no weights that are known here: no checkpoint of lnn_lightning (meta.pt) and no *.safetensors."
    )


class Folder:
    """The module in a checkpoint folder of this package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ours = load_metadata(path).get(OURS, {})
        self._summed = ours.get("format", 1) > 1
        known = tensor_names(path)
        self._known = {key.removeprefix(_STATE): what for key, what in known.items() if key.startswith(_STATE)}
        numbers = {key: value for key, value in ours.get("values", {}).items() if isinstance(value, Tensor)}
        self._numbers = {key.removeprefix(_STATE): each for key, each in numbers.items() if key.startswith(_STATE)}
        self._known |= {key: (tuple(value.shape), value.dtype) for key, value in self._numbers.items()}
        self._tied = {key: first for key, first in ours.get("tied", {}).items() if first in self._known}

    def tensors(self) -> Known:
        """Names, whole shapes and dtypes."""
        return self._known | {key: self._known[first] for key, first in self._tied.items()}

    def tied(self) -> dict[str, str]:
        """Other names of a tensor -> the first one."""
        return self._tied

    def read(self, wanted: Mapping[str, Pieces]) -> None:
        """Fills slices in place."""
        by_first: dict[str, list[Pieces]] = {}
        for name, pieces in wanted.items():
            first = self._tied.get(name, name)
            if first in self._numbers:
                fill(pieces, self._numbers[first].__getitem__)
            elif some := tuple(piece for piece in pieces.pieces if piece.value.numel()):
                by_first.setdefault(_STATE + first, []).append(replace(pieces, pieces=some))
        while by_first:  # twice only if several names of one tensor are wanted
            read_pieces(self.path, {name: each.pop() for name, each in by_first.items()})
            by_first = {name: each for name, each in by_first.items() if each}

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compares files with the manifest; the first format has none."""
        if self._summed:
            verify(self.path, share, shares)


class TorchFile:
    """The ``state_dict`` in a Lightning checkpoint, or a bare one; the file is mapped, so only what is used is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = load_safely(path)
        state = content.get("state_dict", content) if isinstance(content, dict) else None
        self._tensors: dict[str, Tensor] = {}
        if isinstance(state, Mapping):
            self._tensors = {key: value for key, value in state.items() if type(value) in (Tensor, torch.nn.Parameter)}
        if not self._tensors:
            found = f" It has {', '.join(map(repr, content))}." if isinstance(content, dict) else ""
            raise CheckpointError(f"{path} holds no `state_dict` with tensors.{found}")

    def tensors(self) -> Known:
        """Names, whole shapes and dtypes."""
        return {name: (tuple(value.shape), value.dtype) for name, value in self._tensors.items()}

    def tied(self) -> dict[str, str]:
        """Other names of a tensor -> the first one."""
        first: dict[Any, str] = {}
        names = {}
        for name, value in self._tensors.items():
            same = first.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), name)
            if same != name and value.numel():
                names[name] = same
        return names

    def read(self, wanted: Mapping[str, Pieces]) -> None:
        """Fills slices in place."""
        for name, pieces in wanted.items():
            whole = self._tensors[name]
            fill(pieces, whole.detach().__getitem__)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """There are no checksums."""


def load_safely(path: Path) -> Any:
    """A file of ``torch.save`` that holds tensors and plain values; tensors are mapped, not read.

    Raises:
        CheckpointError: it holds something else, or is damaged.
    """
    try:
        with values_allowed():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" (it names {named[1]})" if named else ""
        raise CheckpointError(
            f"{path} holds more than tensors and plain values{what}, which only a pickle could bring back. It was not "
            "loaded, and nothing in it was run."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of torch: {error}") from error
