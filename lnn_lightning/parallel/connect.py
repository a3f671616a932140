"""How the processes of a job find each other.

torch waits in silence for as long as a collective may take, and then counts the processes that came. Here each rank
signs in at a store on rank 0 first: who is missing is said, while waiting and at the end. From what the ranks tell of
themselves follows the network interface for gloo, which otherwise listens where the host's own name points: on many
machines that is the loopback, where no other host can reach it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from lnn_lightning.parallel.errors import ParallelError
from lnn_lightning.parallel.hosts import Host, ranks_in_words

log = logging.getLogger(__name__)

_WORD_EVERY = timedelta(seconds=60)
_SLACK = timedelta(seconds=30)
"""How much longer than rank 0 the others wait, so that they hear what it has to say."""


class ConnectError(ParallelError):
    """Processes of the job did not find each other in time."""


@dataclass(frozen=True)
class Presence:
    """What a rank tells of itself: its host, and its address on the way to rank 0."""

    host: Host
    address: str


def connect(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, list[Presence]]:
    """Meets the other processes of the job at a store. Collective over all processes.

    Under torchrun's agent the store is there already, otherwise rank 0 opens it.

    Args:
        address: name or address of rank 0's host.
        port: port of the store.
        rank: this process.
        world_size: number of processes to wait for.
        timeout: how long to wait for all.

    Returns:
        The store, for ``init_process_group``, and what each rank told of itself.

    Raises:
        ConnectError: not all came; on all that came, with the ranks that are missing.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        store: Store = TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not served,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistError as error:
        if rank == 0 and not served:
            raise ConnectError(
                f"Rank 0 cannot open {address}:{port}, where the others are to find it: {error}\nIf the port is taken, "
                "set MASTER_PORT to a free one, the same for all processes."
            ) from error
        raise ConnectError(_unreachable(address, port, rank, timeout)) from error
    own = Presence(Host.here(), _source_address(address, port))
    meeting = PrefixStore(f"lnn_lightning/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    meeting.set(f"rank{rank}", json.dumps({"host": own.host.as_dict(), "address": own.address}))
    if rank == 0:
        everyone = _receive_all(meeting, world_size, timeout)
        meeting.set("result", json.dumps(everyone))
    else:
        everyone = _await_result(meeting, rank, timeout)
    missing = [other for other, value in enumerate(everyone) if value is None]
    if missing:
        raise ConnectError(_absent(missing, everyone, rank, timeout))
    return store, [Presence(Host(**value["host"]), value["address"]) for value in everyone if value is not None]


def _receive_all(meeting: Store, world_size: int, timeout: timedelta) -> list[dict[str, Any] | None]:
    """What each rank told of itself, None for those that did not come in time; says every minute who is missing."""
    deadline = time.monotonic() + timeout.total_seconds()
    missing = list(range(world_size))
    while missing and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(DistError):
            meeting.wait([f"rank{rank}" for rank in missing], min(_WORD_EVERY, timedelta(seconds=left)))
        missing = [rank for rank in missing if not meeting.check([f"rank{rank}"])]
        if missing and deadline > time.monotonic():
            log.warning(
                f"Waiting for {ranks_in_words(missing)} of {world_size} processes, for up to "
                f"{deadline - time.monotonic():.0f} s more."
            )
    return [None if rank in missing else json.loads(meeting.get(f"rank{rank}")) for rank in range(world_size)]


def _await_result(meeting: Store, rank: int, timeout: timedelta) -> list[dict[str, Any] | None]:
    try:
        meeting.wait(["result"], timeout + _SLACK)
        return json.loads(meeting.get("result"))
    except DistError as error:
        raise ConnectError(
            f"Rank {rank} ({socket.gethostname()}) signed in, but rank 0 did not within "
            f"{(timeout + _SLACK).total_seconds():.0f} s, or it ended: look at what rank 0 says. ({error})"
        ) from error


def _absent(missing: Sequence[int], everyone: Sequence[Any], rank: int, timeout: timedelta) -> str:
    hosts: dict[str, list[int]] = {}
    for other, value in enumerate(everyone):
        if value is not None:
            hosts.setdefault(value["host"]["name"], []).append(other)
    came = ", ".join(f"{name} ({ranks_in_words(ranks)})" for name, ranks in hosts.items())
    many = f"{len(missing)} of {len(everyone)} processes"
    return (
        f"{many} did not come within {timeout.total_seconds():.0f} s: {ranks_in_words(missing)}. Those that came are "
        f"on {came}; this is rank {rank}. Look at what the missing ones printed. Is the command running on every node, "
        "with the same `num_nodes` and `devices` (under SLURM: with `srun` before it)? "
        "`PTDPStrategy(timeout=...)` is how long is waited."
    )


def _unreachable(address: str, port: int, rank: int, timeout: timedelta) -> str:
    here = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        reason = (
            f"the name {address!r} cannot be resolved on {here} ({error}): set MASTER_ADDR to the address of rank 0"
        )
    else:
        reason = f"{address!r} is {', '.join(found)} on {here}"
        if all(each.startswith("127.") or each == "::1" for each in found):
            reason += ", which is this host itself: set MASTER_ADDR to an address of rank 0 that all hosts reach"
        else:
            reason += ": is rank 0 running there, and does a firewall let the port through?"
    return (
        f"Rank {rank} cannot reach rank 0 at {address}:{port} within {timeout.total_seconds():.0f} s: {reason}. With "
        "torchrun, MASTER_ADDR is what `--local-addr` of the first node says (`--master-addr` without a rendezvous)."
    )


# ---------------------------------------------------------------------------------------------------- interface


def choose_gloo_interface(everyone: Sequence[Presence], rank: int) -> str | None:
    """Sets ``GLOO_SOCKET_IFNAME`` to the interface that reaches the other hosts, if there are any and it is not set.

    Args:
        everyone: what each rank told of itself, from :func:`connect`.
        rank: this process.

    Returns:
        The interface, or None if gloo is left to choose.
    """
    own = everyone[rank]
    elsewhere = [other for other in everyone if other.host != own.host]
    if not elsewhere or "GLOO_SOCKET_IFNAME" in os.environ:
        return None
    address = own.address
    if own.host == everyone[0].host:  # the way to rank 0 says nothing here; the others' addresses are on the network
        address = _source_address(elsewhere[0].address, 1)
    name = _interface_with(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        log.debug(f"gloo uses {name} ({address}), which reaches the other hosts; GLOO_SOCKET_IFNAME chooses another.")
    return name


def _source_address(address: str, port: int) -> str:
    """The address of this host on the way to another; nothing is sent. Empty if there is no way."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return ""


def _interface_with(address: str) -> str | None:
    """Name of the network interface with an IPv4 address; None for the loopback, or where it cannot be found out."""
    try:
        import fcntl

        packed = socket.inet_aton(address)
    except (ImportError, OSError):
        return None
    request = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == packed and packed[0] != 127:
                    return name
    return None
