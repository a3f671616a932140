"""Compression of gradients in a strategy whose ranks hold parts of the module."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lnn_lightning.checkpoint import tensor_names
from lnn_lightning.checkpoint.distributed import read_pieces
from lnn_lightning.checkpoint.pieces import Pieces, whole_tensor
from lnn_lightning.checkpoint.states import OURS
from lnn_lightning.communication import Compression, Compressors, LocalSGD
from lnn_lightning.communication.ddp import refuse_gradients
from lnn_lightning.parallel.data.shards import local_of
from lnn_lightning.parallel.layout import DATA
from lnn_lightning.strategies.local_steps import set_up_local_steps
from lnn_lightning.strategies.running import StepHooks

_PART = "compression."
_MADE_FOR = "made_for"


def advise(compression: Compression, optimizers: Sequence[Optimizer]) -> None:
    """Warns where an optimizer does not go well with a compression."""
    for optimizer in optimizers:
        if (advice := compression.advice(optimizer)) is not None:
            rank_zero_warn(advice)


class CompressionHooks(StepHooks):
    """Compression part of a strategy. Its state is of each rank by itself, and so are its entries in checkpoints."""

    _gradient_compression: Compression | None = None
    _compressors: Compressors | None = None

    def setup_compression(self) -> None:
        """Makes what compresses the gradients of this module, once; before parameters are sharded.

        Raises:
            LayoutError: gradients that cannot be compressed.
        """
        settings, engine = self._gradient_compression, self.engine
        if settings is None or engine.reduction is not None:
            return
        self._compressors = None
        if self.mesh.size(DATA) == 1 and (self.mesh.experts is None or self.mesh.layout.expert_data_size == 1):
            rank_zero_warn(
                f"`gradient_compression={settings}` does nothing: there is one data rank, which averages no gradients. "
                "Gradients that are added up over tensor and pipeline ranks are not compressed."
            )
            return
        refuse_gradients(engine.root, settings)
        self._compressors = Compressors(settings, engine.seed, engine.settings.reduce_dtype)
        engine.reduction = self._compressors

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if isinstance(self._gradient_compression, LocalSGD):
            set_up_local_steps(self, trainer)
        super().setup_optimizers(trainer)
        if self._compressors is not None:
            advise(self._compressors.compression, self.optimizers)

    # ---------------------------------------------------------------- checkpoints

    @override
    def _entries(
        self, checkpoint: dict[str, Any], averages: Iterable[tuple[str, Mapping[str, Any]]]
    ) -> tuple[dict[str, Pieces], dict[str, Any], dict[str, str]]:
        tensors, values, tied = super()._entries(checkpoint, averages)
        if self._compressors is not None and "optimizer_states" in checkpoint:  # else weights alone are saved
            prefix = f"{_PART}{self.global_rank}."
            values[prefix + _MADE_FOR] = self._made_for()
            for place, state in self._compressors.state_dict().items():
                for key, value in state.items():
                    entry = f"{prefix}{place}.{key}"
                    if isinstance(value, Tensor) and value.ndim and value.numel():
                        tensors[entry] = whole_tensor(value)
                    else:
                        values[entry] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
        return tensors, values, tied

    def _made_for(self) -> dict[str, Any]:
        """What the state of this rank's compressors fits to."""
        residence = self.engine.residence
        held = [
            (name, tuple(local_of(parameter).shape))
            for name, parameter in self.engine.root.named_parameters()
            if residence.lives_here(name)
        ]
        return {
            "gradient_compression": str(self._gradient_compression),
            "layout": {key: int(value) for key, value in asdict(self.mesh.layout).items()},
            "zero_stage 2 or 3": self.engine.sharding is not None,
            "parameters of a rank": zlib.crc32(repr(held).encode()),
        }

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        states, ours = checkpoint["optimizer_states"], checkpoint.get(OURS)
        if self._compressors is None or ours is None or not states:
            return
        self._compressors.seed = self.engine.seed
        saved = {key.removeprefix(_PART): value for key, value in ours["values"].items() if key.startswith(_PART)}
        if not saved:  # it was saved without compression
            return
        prefix = f"{self.global_rank}."
        mine = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
        if self._fits(mine.pop(_MADE_FOR, None) or saved[f"0.{_MADE_FOR}"]):
            self._load_compression(Path(states[0]["path"]), mine)

    def _fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether the state of all ranks is for what they hold now; tells the user what is not. Collective."""
        now = self._made_for()
        changed = [(key, saved.get(key), value) for key, value in now.items() if saved.get(key) != value]
        of_all: list[Any] = [None] * self.world_size
        dist.all_gather_object(of_all, changed)
        if not any(of_all):
            return True
        what = [
            key if isinstance(new, int) else f"{key} (was {old}, is {new})"
            for key, old, new in next(filter(None, of_all))
        ]
        rank_zero_warn(
            f"What gradient compression has kept back is dropped, as it was made for another run: {', '.join(what)} "
            "changed since the checkpoint was saved. It begins anew; everything else goes on."
        )
        return False

    def _load_compression(self, path: Path, values: Mapping[str, Any]) -> None:
        prefix = f"{_PART}{self.global_rank}."
        read: dict[str, Tensor] = {
            entry.removeprefix(prefix): torch.empty(shape, dtype=dtype)
            for entry, (shape, dtype) in tensor_names(path).items()
            if entry.startswith(prefix)
        }
        self._agree(lambda: read_pieces(path, {prefix + key: whole_tensor(value) for key, value in read.items()}))
        state: dict[str, dict[str, Any]] = {}
        for key, value in {**values, **read}.items():
            place, _, rest = key.partition(".")
            state.setdefault(place, {})[rest] = value
        assert self._compressors is not None
        self._compressors.load_state_dict(state)
