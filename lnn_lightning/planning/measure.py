"""What a rank really holds while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lnn_lightning.communication import Compressors
from lnn_lightning.optim.masters import masters_of
from lnn_lightning.parallel.data.shards import local_of
from lnn_lightning.parallel.pipeline.engine import PipelineEngine
from lnn_lightning.parallel.step.extension import StepExtension
from lnn_lightning.parallel.step.saved import watching_saved
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors
from lnn_lightning.planning.states import storage_bytes

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class SavedWatch(StepExtension):
    """Counts the memory that is alive because it was saved for backward, as the innermost extension of an engine.

    It is counted behind each forward of a stage, where it is largest.

    Args:
        engine: whose steps to watch; they are slower meanwhile.

    Attributes:
        peak: most bytes at once.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine, self.peak = engine, 0
        self._saved: dict[int, StorageWeakRef] = {}

    def note(self, tensor: Tensor) -> None:
        """Notes what is saved; parts and the like are counted by their memory."""
        storage = tensor.untyped_storage()
        if (known := self._saved.get(storage._cdata)) is None or known.expired():
            self._saved[storage._cdata] = StorageWeakRef(storage)

    @override
    @contextmanager
    def forward(self, stage: int, index: int) -> Iterator[None]:
        with watching_saved(self.note):
            yield
        self.count()

    def count(self) -> None:
        """Adds up what is alive now."""
        outside = self._outside()
        self._saved = {key: ref for key, ref in self._saved.items() if not ref.expired()}
        total = 0
        for key, ref in self._saved.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None and key not in outside:
                total += storage.nbytes()
        self.peak = max(self.peak, total)

    def _outside(self) -> set[int]:
        """Memory of the module and the batch, of whole parameters of sharded ones too."""
        current = self.engine._current
        batch = [leaf for leaf in tree_leaves(current.parts if current is not None else ()) if isinstance(leaf, Tensor)]
        tensors = [local_of(tensor) for _, tensor in named_tensors(self.engine.root)] + batch
        if self.engine.sharding is not None:
            tensors += self.engine.sharding.gathered()
        return {tensor.untyped_storage()._cdata for tensor in tensors}


def held_bytes(engine: PipelineEngine) -> dict[str, int]:
    """Bytes of the parameters (with the module's buffers) and the gradients on this rank, each memory once."""
    here = [tensor for _, tensor in named_tensors(engine.root) if not is_stand_in(tensor)]
    gradients = [tensor.grad for tensor in here if tensor.grad is not None]
    if engine.sharding is not None:
        gradients += [shard.local.grad for shard in engine.sharding.shards if shard.local.grad is not None]
    return {
        "parameters": storage_bytes(local_of(tensor) for tensor in here),
        "gradients": storage_bytes(local_of(gradient) for gradient in gradients),
    }


def state_bytes(optimizers: list[Optimizer]) -> int:
    """Bytes of the optimizers' states and master weights on this rank, each memory once."""
    leaves: list[Any] = [leaf for optimizer in optimizers for leaf in tree_leaves(list(optimizer.state.values()))]
    for masters in map(masters_of, optimizers):
        leaves += [copy for _, copy in masters.copies] if masters is not None and masters.kept else []
    return storage_bytes(local_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))


def compression_bytes(compressors: Compressors) -> int:
    """Bytes of what compressors keep on this rank from one step to the next, each memory once."""
    return storage_bytes(value for state in compressors.state_dict().values() for value in state.values())


class PeakMemory:
    """Peak of the process's memory above what it has when this is made: of the accelerator's, or resident memory.

    Args:
        device: where the module is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # not on every system; the peak is then since the process began
                _RESET.write_text("5")
        self._before = self._now("VmRSS")

    def growth(self) -> int | None:
        """Bytes since then (None: this system does not tell)."""
        if self._before is None or (peak := self._now("VmHWM")) is None:
            return None
        return max(peak - self._before, 0)

    def _now(self, which: str) -> int | None:
        if self._device is not None:
            peak = which == "VmHWM"
            return torch.cuda.max_memory_allocated(self._device) if peak else torch.cuda.memory_allocated(self._device)
        with contextlib.suppress(OSError, StopIteration):
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(which))
            return int(line.split()[1]) * 1024
        return None
