"""Exchanges in two steps, and which ranks they go through."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lnn_lightning.parallel.expert.axis import ExpertAxis
from lnn_lightning.parallel.expert.dispatch import run_experts
from lnn_lightning.parallel.expert.exchange import Exchange, Route, counting, receive, send
from lnn_lightning.parallel.expert.hosts import expert_ranks, host_groups
from lnn_lightning.parallel.hosts import Host
from lnn_lightning.parallel.layout import EXPERT, Layout, Mesh
from tests.helpers.ranks import run_ranks
from tests.parallel.expert.routed import local_experts, make_case

LEFT, RIGHT = Host("left", "a", 1), Host("right", "b", 1)


def _two_steps(rank: int, world_size: int) -> None:
    layout = Layout(1, 4, expert_parallel_size=4)
    assert host_groups(layout, [LEFT] * 4) is None
    assert host_groups(layout, [Host(name, name, 1) for name in "abcd"]) is None
    assert host_groups(layout, [LEFT, RIGHT, LEFT, RIGHT]) is None
    assert host_groups(layout, [LEFT, RIGHT, RIGHT, LEFT]) is None
    assert host_groups(layout, [LEFT, LEFT, LEFT, RIGHT]) is None
    assert host_groups(Layout(1, 4, expert_parallel_size=2), [LEFT, LEFT, RIGHT, RIGHT]) is None
    hosts = host_groups(layout, [LEFT, LEFT, RIGHT, RIGHT])
    members = [dist.get_process_group_ranks(group) for group in hosts]
    assert members == [[0, 1] if rank < 2 else [2, 3], [0, 2] if rank % 2 == 0 else [1, 3]]

    everyone = dist.group.WORLD
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
        between = torch.tensor([bytes_sent[1].between_hosts])
        dist.all_reduce(between)
        owner = {each: place for place in range(world_size) for each in one.span(experts, place)}
        remote = sum(
            each in owner and owner[each] // 2 != source // 2
            for source, expert in enumerate(case.expert)
            for each in expert.tolist()
        )
        width = case.values[0].shape[1] + case.weights[0].shape[1]
        assert between.item() == remote * width * 8 * 2


def _recomputed(rank: int, world_size: int) -> tuple[int, int]:
    route = Route(ExpertAxis(world_size, rank, dist.group.WORLD), [1, 1], [1, 1])
    weight = torch.ones((), requires_grad=True)

    def block(values: torch.Tensor) -> torch.Tensor:
        exchange = Exchange(route)
        rows, _ = receive(send(values * weight, exchange), exchange)  # nothing behind it saves anything, here,
        return rows * rows if rank else rows + 1  # but it does on the other rank

    values = torch.ones(2, 3, requires_grad=True)
    with counting() as sent:
        checkpoint(block, values, use_reentrant=False).sum().backward()
    return sent.forward, sent.backward


def test_recomputation_stops_behind_the_exchange_on_all_ranks() -> None:
    assert run_ranks(_recomputed, 2) == [(2 * 3 * 4, 3 * 4)] * 2


def _groups(rank: int, world_size: int) -> list[list[int]]:
    layouts = [Layout(1, 2, 2, 1, 2), Layout(1, 2, 2, 1, 2, True), Layout(2, 2, 1, 1, 2)]
    found = [dist.get_process_group_ranks(Mesh.create(layout, "cpu").experts.get_group(EXPERT)) for layout in layouts]
    for layout, ranks in zip(layouts, found, strict=True):
        assert ranks in expert_ranks(layout)
        assert sorted(sum(expert_ranks(layout), [])) == list(range(world_size))
    return found


def test_expert_ranks_are_those_of_the_mesh() -> None:
    assert run_ranks(_groups, 4)[0] == [[0, 1], [0, 2], [0, 1]]


def test_two_steps_give_the_same_bits() -> None:
    run_ranks(_two_steps, 4)
