"""Groups within a group, made by its members alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


def part_of(group: dist.ProcessGroup, parts: Sequence[Sequence[int]], what: str) -> dist.ProcessGroup:
    """This rank's part of a group, with the group's timeout.

    Collective over the group; other ranks need not know: each of several data groups on a mesh can make its own.

    Args:
        group: that is divided.
        parts: places in the group; each place in one part, the same on all ranks.
        what: the parts are for, to tell groups apart in a debugger.
    """
    everyone = dist.get_process_group_ranks(group)
    mine = next(part for part in parts if dist.get_group_rank(group, dist.get_rank()) in part)
    timeout = group._get_backend(group._device_types[0]).options._timeout
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        # NCCL's communicators are then split from that of all ranks, which would have to take part in `new_group`
        made = dist.split_group(group, [list(part) for part in parts], timeout=timeout, group_desc=what)
    else:
        members = [everyone[place] for place in mine]
        made = dist.new_group(members, timeout=timeout, use_local_synchronization=True, group_desc=what)
    assert made is not None
    return made
