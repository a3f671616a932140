"""Exchanges in two steps, and how hosts are grouped for them."""

from dataclasses import replace

import torch
import torch.distributed as dist

from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.dispatch import run_experts
from lnn_lightning.parallel.expert.exchange import counting, host_groups
from lnn_lightning.parallel.hosts import Host
from tests.helpers.ranks import run_ranks
from tests.parallel.expert.routed import local_experts, make_case

LEFT, RIGHT = Host("left", "a", 1), Host("right", "b", 1)


def _two_steps(rank: int, world_size: int) -> None:
    everyone = dist.group.WORLD
    assert host_groups(everyone, [LEFT] * 4) is None
    assert host_groups(everyone, [Host(name, name, 1) for name in "abcd"]) is None
    assert host_groups(everyone, [LEFT, RIGHT, LEFT, RIGHT]) is None
    assert host_groups(everyone, [LEFT, RIGHT, RIGHT, LEFT]) is None
    assert host_groups(everyone, [LEFT, LEFT, LEFT, RIGHT]) is None
    hosts = host_groups(everyone, [LEFT, LEFT, RIGHT, RIGHT])
    members = [dist.get_process_group_ranks(group) for group in hosts]
    assert members == [[0, 1] if rank < 2 else [2, 3], [0, 2] if rank % 2 == 0 else [1, 3]]

    one = ExpertAxis(world_size, rank, everyone, scale=0.25)
    for tokens, experts in (([7, 0, 4, 5], 6), ([0, 9, 0, 0], 4), ([0, 0, 0, 0], 5)):
        case = make_case(tokens, experts, 2)
        found, bytes_sent = [], []
        for axis in (one, replace(one, hosts=hosts)):
            weights, compute = local_experts(case, axis)
            values = case.values[rank].clone().requires_grad_()
            with counting() as sent:
                result = run_experts(values, case.expert[rank], experts, axis, compute)
                (result * case.weights[rank]).sum().backward()
            found.append([result, values.grad, *(weight.grad for weight in weights)])
            bytes_sent.append(sent)
        for single, double in zip(*found, strict=True):
            assert torch.equal(single, double)
        assert bytes_sent[0].between_hosts == 0
        assert bytes_sent[1].exchanges == 2 * bytes_sent[0].exchanges
        # What goes between hosts goes there once: as much in all as the rows that live on the other host.
        first_remote = experts // 2 if rank < 2 else 0
        between = torch.tensor([bytes_sent[1].between_hosts])
        dist.all_reduce(between)
        remote = torch.tensor([0])
        spans = [one.span(experts, each) for each in range(world_size)]
        for source, expert in enumerate(case.expert):
            for each in expert.tolist():
                owners = [place for place, span in enumerate(spans) if each in span]
                remote += bool(owners) and owners[0] // 2 != source // 2
        width = case.values[0].shape[1] + case.weights[0].shape[1]
        assert between.item() == remote.item() * width * 8 * 2, first_remote


def test_two_steps_give_the_same_bits() -> None:
    run_ranks(_two_steps, 4)
