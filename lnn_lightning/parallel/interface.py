"""The network interface that gloo listens on.

By itself gloo listens where the host's own name points to: on many machines that is the loopback, where no other host
can reach it. The interface on the way to the other hosts is the right one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Sequence

from lnn_lightning.parallel.hosts import Presence

log = logging.getLogger(__name__)


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
        address = source_address(elsewhere[0].address, 1)
    name = _interface_with(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        log.debug(f"gloo uses {name} ({address}), which reaches the other hosts; GLOO_SOCKET_IFNAME chooses another.")
    return name


def source_address(address: str, port: int) -> str:
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
