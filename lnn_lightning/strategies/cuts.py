"""How the parameters that a rank's optimizers update lie in the whole ones."""

from __future__ import annotations

from torch import Tensor

from lnn_lightning.optim.cuts import Cut, KnowsCuts
from lnn_lightning.parallel.data.shards import is_sharded, local_of
from lnn_lightning.parallel.layout import EXPERT, EXPERT_DATA, TENSOR
from lnn_lightning.parallel.pipeline.residence import Residence
from lnn_lightning.parallel.step.standin import is_stand_in


def bind_cuts(optimizer: KnowsCuts, residence: Residence) -> None:
    """Tells an optimizer which parts of which parameters tensor ranks, data ranks (ZeRO) and expert ranks have.

    Args:
        optimizer: whose groups have, or will have, parameters of the module.
        residence: the module's parts.
    """
    mesh = residence.mesh
    cuts: dict[int, Cut] = {}
    for name, parameter in residence.root.named_parameters():
        groups = residence.cuts(name)
        if is_stand_in(parameter) or not (groups or is_sharded(parameter)):
            continue
        pieces = residence.pieces(name, parameter)
        real = list(local_of(parameter).shape)
        for _, dim in groups:
            lengths = {piece.offsets[dim]: piece.value.shape[dim] for piece in pieces.pieces}
            real[dim] = sum(lengths.values())  # without padding
        if is_sharded(parameter):
            groups.append((residence.shard_group_of(name), 0))
        held = parameter if residence.sharding is None else residence.sharding.local(parameter)
        cuts[id(held)] = Cut(pieces.shape, tuple(real), tuple(groups))

    def describe(parameter: Tensor) -> Cut | None:
        return cuts.get(id(residence.copied(parameter)))

    over_experts = [mesh.experts.get_group(axis) for axis in (EXPERT_DATA, EXPERT)] if mesh.experts is not None else []
    # the same ranks have the same group, which must not add up twice
    order = dict.fromkeys([mesh.shard_group, *over_experts, mesh.group(TENSOR)])
    optimizer.bind_cuts(describe, list(order))
