"""How the parameters that a rank's optimizers update lie in the whole ones."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from lnn_lightning.optim.cuts import Cut, KnowsCuts
from lnn_lightning.parallel.data.shards import is_sharded, local_of
from lnn_lightning.parallel.layout import TENSOR
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.parallel.step.standin import is_stand_in


def bind_cuts(optimizer: KnowsCuts, residence: Residence) -> None:
    """Tells an optimizer which parts of which parameters tensor ranks (tensor parallelism) and data ranks (ZeRO) have.

    Args:
        optimizer: whose groups have, or will have, parameters of the module.
        residence: the module's parts.
    """
    mesh = residence.mesh
    data, tensor = mesh.shard_group, mesh.group(TENSOR)
    cuts: dict[int, Cut] = {}
    for name, parameter in residence.root.named_parameters():
        divided = residence.is_divided(name)
        if is_stand_in(parameter) or not (divided or is_sharded(parameter)):
            continue
        pieces, groups = residence.pieces(name, parameter), list[tuple[ProcessGroup, int]]()
        real = list(local_of(parameter).shape)
        if divided:
            assert residence.tensor is not None
            dim, _ = residence.tensor.spans(name)
            real[dim] = sum(piece.value.shape[dim] for piece in pieces.pieces)  # without padding
            groups.append((tensor, dim))
        if is_sharded(parameter):
            groups.append((data, 0))
        held = parameter if residence.sharding is None else residence.sharding.local(parameter)
        cuts[id(held)] = Cut(pieces.shape, tuple(real), tuple(groups))

    def describe(parameter: Tensor) -> Cut | None:
        return cuts.get(id(residence.copied(parameter)))

    optimizer.bind_cuts(describe, [data, tensor])
