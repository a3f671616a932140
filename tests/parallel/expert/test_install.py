"""Seams of all kinds, checked and installed."""

from __future__ import annotations

import copy

import torch.distributed as dist

from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.install import ExpertSharding, prepare_seams
from lnn_lightning.parallel.step.standin import is_stand_in
from tests.helpers.ranks import run_ranks
from tests.parallel.expert.families import LLaMAMoE, switch
from tests.parallel.expert.test_fused import compare


def _loops(rank: int, size: int) -> dict[str, float]:
    found = {}
    for name in ("litgpt", "switch"):
        reference = LLaMAMoE().double() if name == "litgpt" else switch().encoder.block[1].layer[1].mlp.double()
        block = copy.deepcopy(reference)
        for parameter in reference.parameters():
            dist.broadcast(parameter.data, 0)
        block.load_state_dict(reference.state_dict())
        axis = ExpertAxis(size, rank, dist.group.WORLD, 1 / size)
        seams = prepare_seams(block)
        assert [each.kind for each in seams] == ["loop"], seams
        sharding = ExpertSharding(block, seams, axis)
        sharding.install()
        assert not sharding.left, sharding.left
        for each, parameter in block.named_parameters():
            assert is_stand_in(parameter) == (not sharding.lives_here(each))
            assert (each in sharding.names) == (".experts." in f".{each}")
        found[name] = compare(block, reference, axis, sharding)
    return found


def test_loops() -> None:
    for found in run_ranks(_loops, 2):
        assert max(found.values()) < 1e-12, found
