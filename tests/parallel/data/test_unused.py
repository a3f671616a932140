"""Parameters that some data ranks use and others do not, as the data has it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lnn_lightning.parallel.data.replicate import Replica
from tests.helpers.ranks import launch_ranks, run_ranks
from tests.helpers.reference import Run, differences, train_all, train_reference
from tests.zoo import ZOO


def _replicas(rank: int, world_size: int) -> list[list[float | None]]:
    found = []
    for overlap in (True, False):
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(5)]
        replica = Replica(parameters, dist.group.WORLD, overlap)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            replica.begin()
            first = parameters[0].sum() + (rank + 1) * parameters[3].sum()
            (first + parameters[2].sum() if rank == 0 else first).backward()
            last = parameters[0].sum() + (parameters[1].sum() if rank == 0 else 0)
            if overlap:
                replica.arm(last)
            last.backward()
            replica.finish()
            found.append([None if p.grad is None else float(p.grad[0]) for p in parameters])
    return found


def test_a_replica_knows_what_other_ranks_use() -> None:
    """Used by: all; one rank in the last backward; one rank before it; all before it; nobody."""
    for found in run_ranks(_replicas, 2):
        assert found == [[2.0, 0.5, 0.5, 1.5, None]] * 4


RUNS = [
    ({"microbatches": 1}, Run(n_steps=6)),
    ({"microbatches": 2}, Run(n_steps=6)),
    ({"microbatches": 1}, Run(n_steps=3, accumulate=2, clip=0.5)),
    ({"microbatches": 2}, Run(n_steps=3, accumulate=2)),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_that_one_data_rank_uses(stage: int) -> None:
    """A parameter without gradient on all ranks is left alone by the optimizer (no decay, no momentum), others not."""
    jobs = [("token_experts", {"data_parallel_size": 2, "zero_stage": stage, **layout}, run) for layout, run in RUNS]
    results = launch_ranks(train_all, 2, jobs)
    for index, (layout, run) in enumerate(RUNS):
        expected = train_reference(ZOO["token_experts"], run)
        found = differences([each[index] for each in results], expected, 1e-9)
        assert not found, f"{layout} {run}: {found}"
