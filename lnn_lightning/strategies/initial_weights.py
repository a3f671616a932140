"""A run's first weights from a file, each rank reading only what it holds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lnn_lightning.checkpoint.names import match_names
from lnn_lightning.checkpoint.pieces import Pieces
from lnn_lightning.checkpoint.sources import open_source
from lnn_lightning.parallel.errors import StepError
from lnn_lightning.parallel.expert.layer import moe_layers
from lnn_lightning.parallel.expert.upcycle import dense_names
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.parallel.step.standin import is_stand_in, named_tensors


@torch.no_grad()
def read_initial_weights(
    path: str | Path, module: pl.LightningModule, residence: Residence, unset: Collection[str] = ()
) -> None:
    """Fills what this rank holds of a divided module from a checkpoint, a ``.ckpt`` or safetensors.

    Args:
        path: where the weights are.
        module: the module.
        residence: what of it is here.
        unset: names of parameters here that have no values yet.

    Raises:
        CheckpointError: the weights cannot be read or do not fit; ``strict_loading = False`` in the module allows for
            missing ones and others that are left over.
        StepError: a parameter would have no values.
    """
    source = open_source(path)
    source.verify(dist.get_rank(), dist.get_world_size())
    known = {name: shape for name, (shape, _) in source.tensors().items()}
    tensors = dict(named_tensors(module))
    first_names = residence.name_of_key()
    keys = [key for key, value in module.state_dict().items() if isinstance(value, Tensor) and key in first_names]
    wanted = {key: _whole_shape(residence, first_names[key], tensors[first_names[key]]) for key in keys}
    in_dense = dense_names(moe_layers(module), wanted, known)
    dense = {in_dense.get(key, key): shape for key, shape in wanted.items() if in_dense.get(key, key)}
    found = match_names(dense, known, first_names, module.strict_loading, str(path))
    filled = {}
    for key in wanted:
        name = in_dense.get(key, key)
        if (stored := found.get(first_names.get(name, name))) is not None:
            filled[first_names[key]] = stored
    if left := [name for name in unset if name not in filled]:
        raise StepError(
            f"{left[0]!r} was built on the meta device, {path} does not have it and nothing initialises it: give its "
            "module a `reset_parameters()` method, or build the model without meta device."
        )
    rounds: list[dict[str, Pieces]] = [{}]
    for name, stored in filled.items():
        if residence.lives_here(name) and not is_stand_in(tensors[name]):
            if (free := next((each for each in rounds if stored not in each), None)) is None:
                rounds.append(free := {})
            free[stored] = residence.pieces(name, tensors[name])
    for each in rounds:  # more than one if copies of a dense module are experts
        source.read(each)


def _whole_shape(residence: Residence, name: str, value: Tensor) -> tuple[int, ...]:
    return tuple(value.shape) if is_stand_in(value) else residence.whole_shape(name, value)
