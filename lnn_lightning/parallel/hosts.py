"""Which ranks run on which host.

Two processes are on one host when they have the same file systems before them: the same name, the same boot of the same
machine, and the same mount namespace (containers on one machine may share the first two).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Host:
    """One host: what people call it, and what tells it from others of that name."""

    name: str
    machine: str
    mounts: int

    @classmethod
    def here(cls) -> Host:
        """The host of this process."""
        machine, mounts = "", 0
        with contextlib.suppress(OSError):
            machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with contextlib.suppress(OSError):
            mounts = os.stat("/proc/self/ns/mnt").st_ino
        return cls(socket.gethostname(), machine, mounts)


@dataclass(frozen=True)
class Presence:
    """What a rank tells of itself: its host, and its address on the way to rank 0."""

    host: Host
    address: str


def hosts_of(group: ProcessGroup | None) -> list[Host]:
    """The host of each rank of a group, None for all ranks. Collective over the group."""
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, Host.here(), group=group)
    return hosts


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0 to 3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    several = len(runs) > 1 or any(len(run) > 1 for run in runs)
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'ranks' if several else 'rank'} {', '.join(texts)}"


def hosts_in_words(hosts: Sequence[Host] | Mapping[int, Host], ranks: Iterable[int]) -> str:
    """The hosts of some ranks, each with those ranks: ``node1 (ranks 2, 3)``."""
    on: dict[Host, list[int]] = {}
    for rank in ranks:
        on.setdefault(hosts[rank], []).append(rank)
    return ", ".join(f"{host.name} ({ranks_in_words(own)})" for host, own in on.items())


def split_group_warning(hosts: Sequence[Host], tensor_size: int) -> str | None:
    """What to say if ranks that share each layer are not on one host.

    Args:
        hosts: the host of each rank.
        tensor_size: that many neighbouring ranks share each layer.

    Returns:
        The warning with its arithmetic, or None if every group is on one host.
    """
    groups = [range(start, start + tensor_size) for start in range(0, len(hosts), tensor_size)]
    split = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    if not split:
        return None
    counts = {host: hosts.count(host) for host in hosts}
    fitting = [size for size in range(1, tensor_size) if all(count % size == 0 for count in counts.values())]
    if all(count % tensor_size == 0 for count in counts.values()):
        advice = (
            "The sizes fit, but the ranks go round the hosts: start them host by host (under SLURM "
            "`srun --distribution=block`, which is the default)."
        )
    else:
        each = ", ".join(f"{count} on {host.name}" for host, count in list(counts.items())[:8])
        advice = (
            f"tensor_parallel_size={tensor_size} does not divide the processes of every host ({each}"
            f"{', ...' if len(counts) > 8 else ''}). Sizes that do: {', '.join(map(str, fitting))}; use "
            "pipeline_parallel_size or data_parallel_size between hosts."
        )
    return (
        f"{len(split)} of {len(groups)} tensor groups are spread over several hosts, the first one over "
        f"{hosts_in_words(hosts, split[0])}. Tensor ranks communicate in every block, which is slow between hosts. "
        f"{advice}"
    )
