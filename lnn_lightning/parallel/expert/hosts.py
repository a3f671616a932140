"""Groups for exchanges in two steps: within a host, and between hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from lnn_lightning.parallel.hosts import Host
from lnn_lightning.parallel.layout import Layout


def host_groups(layout: Layout, hosts: Sequence[Host]) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Makes the groups of :attr:`ExpertAxis.hosts`. Collective over all processes.

    Args:
        layout: says which ranks share out experts.
        hosts: the host of each rank (:func:`lnn_lightning.parallel.hosts.hosts_of`).

    Returns:
        Of the ranks that this one shares out experts with, those on its host and those at its place on the other
        hosts; None if one step is right: all are on one host, each has its own, or they do not lie host by host,
        equally many on each.
    """
    own = None
    for ranks in expert_ranks(layout):
        each = _each_host([hosts[rank] for rank in ranks])
        if each is None:
            continue
        inner = _own_group([ranks[start : start + each] for start in range(0, len(ranks), each)])
        outer = _own_group([ranks[place::each] for place in range(each)])
        if inner is not None and outer is not None:
            own = inner, outer
    return own


def expert_ranks(layout: Layout) -> list[list[int]]:
    """All groups of ranks that share out experts: the axis ``expert_parallel`` of :attr:`Mesh.experts`."""
    size, parts = layout.expert_parallel_size, layout.expert_tensor_size
    starts = range(0, layout.world_size, size * parts)
    return [[start + part + parts * place for place in range(size)] for start in starts for part in range(parts)]


def _each_host(hosts: list[Host]) -> int | None:
    """How many neighbours are on each host; None: not equally many, or two steps are no use."""
    each = hosts.count(hosts[0])
    runs = [hosts[start : start + each] for start in range(0, len(hosts), each)]
    apart = len({run[0] for run in runs}) == len(runs) and all(run.count(run[0]) == each for run in runs)
    return each if apart and 1 < each < len(hosts) else None


def _own_group(members: list[list[int]]) -> dist.ProcessGroup | None:
    own = None
    for ranks in members:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own
