"""A file of ``torch.save`` written tensor by tensor: what it holds need not fit into memory.

First everything but the bytes of tensors is written, with room left for them; then the bytes, each to its place.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils._pytree import tree_leaves

from lnn_lightning.checkpoint.hub import write_bytes


class Blanks:
    """Tensors without data that stand, in what is to be saved, for those that are read later."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self.made: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The blank of a name; asked for again, the same one, which the file then has once."""
        if name not in self.made:
            with self._mode:
                self.made[name] = torch.empty(shape, dtype=dtype)
        return self.made[name]


def save_by_tensor(path: Path, content: Any, blanks: Blanks, read: Callable[[list[str]], Iterable[Tensor]]) -> None:
    """``torch.save(content, path)`` with tensors that are read when it is their turn.

    Args:
        path: the file.
        content: dicts, lists, plain values, tensors and blanks.
        blanks: where the blanks come from.
        read: gives the tensors of these names, one after the other.
    """
    with skip_data(materialize_fake_tensors=True):
        torch.save(content, path)
    with FakeTensorMode():
        laid_out = torch.load(path, weights_only=True)
    names = {id(blank): name for name, blank in blanks.made.items()}
    places: dict[str, int] = {}
    others: dict[int, Tensor] = {}
    for leaf, placed in zip(tree_leaves(content), tree_leaves(laid_out), strict=True):
        if isinstance(leaf, Tensor):
            place = placed.untyped_storage()._checkpoint_offset  # where torch says the bytes belong
            if id(leaf) in names:
                places[names[id(leaf)]] = place
            else:
                others[place] = torch.empty(0, dtype=torch.uint8).set_(leaf.detach().cpu().untyped_storage())
    sums: dict[int, int] = {}
    with open(path, "r+b") as file:
        for place, data in others.items():
            file.seek(place)
            sums[place] = zlib.crc32(write_bytes(file, data))
        for place, tensor in zip(places.values(), read(list(places)), strict=True):
            file.seek(place)
            sums[place] = zlib.crc32(write_bytes(file, tensor))
    _write_checksums(path, sums)


def _write_checksums(path: Path, sums: dict[int, int]) -> None:
    """Sets the checksums of a zip file's members, by where their data begins: other programs look at them."""
    with zipfile.ZipFile(path) as archive:
        members, entry = archive.infolist(), archive.start_dir
    with open(path, "r+b") as file:
        for member in members:
            file.seek(member.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
            begin = member.header_offset + 30 + sum(lengths)
            file.seek(entry + 28)
            lengths = struct.unpack("<HHH", file.read(6))
            if begin in sums:
                checksum = struct.pack("<L", sums[begin])
                file.seek(entry + 16)
                file.write(checksum)
                if member.flag_bits & 8:  # it is told again behind the data
                    file.seek(begin + member.file_size)
                    signed = file.read(4) == b"PK\x07\x08"
                    file.seek(begin + member.file_size + (4 if signed else 0))
                    file.write(checksum)
            entry += 46 + sum(lengths)
