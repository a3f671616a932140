"""Masks in one bit an element: of ReLUs, whose backward asks no more of their output, and those that are saved."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lnn_lightning.memory.gist.rebuild import REBUILT
from lnn_lightning.memory.saved_tensors import Encoded, Packed, Saved, SavedTensors
from lnn_lightning.parallel.bits import from_bits, to_bits


class ReluMask:
    """What a ReLU saved: where its output is positive.

    The output itself is held until it is known whether another operation keeps it, which makes bits needless.
    """

    def __init__(self, saved: SavedTensors, output: Tensor) -> None:
        self._saved = saved
        self._packed: Packed | None = None
        self._output: Tensor | None = output.detach()
        self._version = output._version

    def settle(self) -> None:
        """Decides; call before the output may be changed or dropped."""
        if (output := self._output) is None:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            kept = self._saved.find(output)
            if kept is not None and kept.name != REBUILT:  # rounded values tell it too
                self._packed = self._saved.hold(output)
            else:
                flat = output.as_strided((output.numel(),), (1,))
                decode = partial(_positive, count=flat.numel(), dtype=output.dtype)
                # not (x <= 0) instead of x > 0: a ReLU lets gradients of NaN pass
                kept = self._saved.keep(output, Encoded("ReLU in bits", [to_bits(flat.le(0).logical_not_())], decode))
                self._packed = Packed(output, kept, (output.shape, output.stride(), 0))
            self._packed.version = self._version  # if it was changed before it was settled, that is noticed
        self._output = None

    def unpack(self) -> Tensor:
        """A tensor that is positive where the output is."""
        self.settle()
        assert self._packed is not None
        return self._packed.unpack()


def _positive(tensors: list[Tensor], count: int, dtype: torch.dtype) -> Tensor:
    return from_bits(tensors[0], count).to(dtype)


class BooleanEncoder:
    """Saved boolean tensors in bits: masks of dropout, of conditions."""

    def encode(self, tensor: Tensor, saved: Saved) -> Encoded | None:
        """See :class:`lnn_lightning.memory.saved_tensors.Encoder`."""
        if tensor.dtype is not torch.bool:
            return None
        return Encoded("masks in bits", [to_bits(tensor)], partial(_booleans, count=tensor.numel()))


def _booleans(tensors: list[Tensor], count: int) -> Tensor:
    return from_bits(tensors[0], count).ne(0)
