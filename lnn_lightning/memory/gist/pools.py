"""What pools save: their input, of which the backward needs the shape only, and the places of the maxima."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lnn_lightning.memory.saved_tensors import Encoded, Packed, SavedTensors

SHAPE_ONLY = "shape only"


class ShapeOnly:
    """Stands for a saved tensor whose values the backward does not read."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._stride, self._dtype, self._device = (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )

    def unpack(self) -> Tensor:
        """A tensor without values."""
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)


@dataclass(frozen=True)
class Windows:
    """The windows of a max-pool over two dimensions; pairs are (height, width).

    Attributes:
        shape: height and width of the input.
        kernel: size of a window.
        stride: from window to window.
        padding: how far the first window begins before the input.
        dilation: from element to element within a window.
    """

    shape: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def fits(self) -> bool:
        """Whether a byte says which element of a window is meant."""
        # rows of a window must lie apart in memory to be told from each other
        apart = (self.kernel[1] - 1) * self.dilation[1] < self.dilation[0] * self.shape[1]
        return self.kernel[0] * self.kernel[1] <= 256 and apart

    def encode(self, indices: Tensor) -> Encoded:
        """Indices into the input as places in the windows."""
        row = self.dilation[0] * self.shape[1]
        inside = (indices - self._begin(indices)).to(torch.int32)
        places = inside.div(row, rounding_mode="floor").mul_(self.kernel[1])
        places += inside.remainder_(row).div_(self.dilation[1], rounding_mode="floor")
        stride = indices.stride()

        def decode(tensors: list[Tensor]) -> Tensor:
            places = tensors[0]
            rows = torch.arange(self.kernel[0], device=places.device) * row
            columns = torch.arange(self.kernel[1], device=places.device) * self.dilation[1]
            inside = (rows[:, None] + columns).view(-1).index_select(0, places.view(-1).to(torch.int32))
            result = torch.empty_strided(places.shape, stride, dtype=torch.int64, device=places.device)
            return torch.add(inside.view(places.shape), self._begin(places), out=result)

        return Encoded("max-pool places in bytes", [places.to(torch.uint8).contiguous()], decode)

    def _begin(self, like: Tensor) -> Tensor:
        """Where each window begins, as an index into the input; before it where there is padding."""
        first = [
            torch.arange(count, device=like.device) * step - pad
            for count, step, pad in zip(like.shape[-2:], self.stride, self.padding, strict=True)
        ]
        return first[0][:, None] * self.shape[1] + first[1]


def max_pool_packer(saved: SavedTensors, value: Tensor, windows: Windows) -> Any:
    """Packs what a max-pool of a value saves."""
    storage = value.untyped_storage()._cdata

    def pack(tensor: Tensor) -> Any:
        if tensor.dtype is not torch.int64:
            return _without_values(saved, tensor, storage)
        kept = saved.keep(tensor, windows.encode(tensor))
        return Packed(tensor, kept)

    return pack


def mean_pool_packer(saved: SavedTensors, value: Tensor) -> Any:
    """Packs what a mean over windows of a value saves."""
    storage = value.untyped_storage()._cdata
    return lambda tensor: _without_values(saved, tensor, storage)


def _without_values(saved: SavedTensors, tensor: Tensor, storage: int) -> ShapeOnly | None:
    if tensor.untyped_storage()._cdata != storage:
        return None
    if saved.report is not None:
        saved.report.add(SHAPE_ONLY, tensor, 0)
    return ShapeOnly(tensor)
