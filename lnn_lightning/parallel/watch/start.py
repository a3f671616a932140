"""Connecting all ranks with the hub."""

from __future__ import annotations

import atexit
import os
import selectors
import socket
from collections.abc import Callable

from lnn_lightning.parallel.watch.hub import Hub
from lnn_lightning.parallel.watch.member import Watch
from lnn_lightning.parallel.watch.wire import Connection, Frame

CONNECT_WITHIN = 30.0


def start_watch(
    rank: int,
    world_size: int,
    who: str,
    host: str,
    several_hosts: bool,
    share: Callable[[str], str],
    everyone: Callable[[bool], bool],
    anyone: Callable[[bool], bool],
) -> Watch:
    """Connects all ranks with a hub in rank 0. Collective over all ranks.

    Args:
        rank: this rank.
        world_size: number of ranks.
        who: this rank's place in the job, for messages.
        host: name or address by which all hosts reach that of rank 0.
        several_hosts: the job runs on more than one.
        share: gives rank 0's text to all ranks.
        everyone: whether all ranks say so.
        anyone: whether any rank says so.

    Returns:
        The watch; not ``watched`` if some rank could not connect.
    """
    if world_size == 1:
        return Watch(rank, who)
    hub = _make_hub(world_size, host, several_hosts, who) if rank == 0 else None
    port, _, token = share(f"{hub.port} {hub.token}" if hub is not None else "0 ").partition(" ")
    connection, hub_who = connect(host, int(port), {"kind": "hello", "rank": rank, "token": token, "who": who})
    if not everyone(connection is not None):
        if connection is not None:
            connection.close()
        return Watch(rank, who, vote=anyone)
    watch = Watch(rank, who, connection, hub, hub_who, tick=max(0.25, world_size / 100))
    watch.start()
    atexit.register(watch.leave)
    os.register_at_fork(after_in_child=watch.close_in_child)
    return watch


def _make_hub(world_size: int, host: str, several_hosts: bool, who: str) -> Hub | None:
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        # a host's own name may mean the loopback interface there, and a network interface everywhere else
        on_all = several_hosts and address.startswith(("127.", "::1"))
        hub = Hub(world_size, "" if on_all else address, who)
    except OSError:
        return None
    hub.start()
    return hub


def connect(host: str, port: int, hello: Frame) -> tuple[Connection | None, str]:
    """A connection to the hub that has let this rank in, and who rank 0 is; None if it could not be made."""
    if port == 0:
        return None, ""
    try:
        connection = Connection(socket.create_connection((host, port), timeout=CONNECT_WITHIN))
    except OSError:
        return None, ""
    connection.send(hello)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.select(timeout=CONNECT_WITHIN)
    frames, still_open = connection.receive()
    if still_open and frames and frames[0]["kind"] == "welcome":
        return connection, str(frames[0].get("who"))
    connection.close()
    return None, ""
