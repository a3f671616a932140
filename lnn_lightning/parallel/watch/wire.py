"""Frames between ranks: JSON lines over TCP that never block, with bounds on what is read and kept."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

LINE_LIMIT = 64 * 1024
BACKLOG_LIMIT = 1024 * 1024

Frame = dict[str, Any]


class Connection:
    """One end of a connection.

    Args:
        sock: a connected socket; the connection owns it.
        line_limit: a longer line closes the connection.
    """

    def __init__(self, sock: socket.socket, line_limit: int = LINE_LIMIT) -> None:
        self.socket, self.line_limit = sock, line_limit
        self._read, self._unsent = bytearray(), bytearray()
        sock.setblocking(False)
        _notice_lost_hosts(sock)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether :meth:`flush` has something to do."""
        return bool(self._unsent)

    def send(self, frame: Mapping[str, Any]) -> None:
        """Sends a frame, or keeps it until there is room; a peer that does not read misses what is too much."""
        line = json.dumps(frame).encode() + b"\n"
        if len(self._unsent) + len(line) <= BACKLOG_LIMIT:
            self._unsent += line
        self.flush()

    def flush(self) -> None:
        """Sends what there is room for."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # reading will tell that the connection is closed

    def receive(self) -> tuple[list[Frame], bool]:
        """What has come, and whether the connection is still open."""
        still_open = True
        try:
            while chunk := self.socket.recv(LINE_LIMIT):
                self._read += chunk
                if len(self._read) > self.line_limit:
                    break
            still_open = bool(chunk)
        except BlockingIOError:
            pass
        except OSError:
            still_open = False
        *lines, rest = bytes(self._read).split(b"\n")
        self._read = bytearray(rest)
        frames = [_parse(line) for line in lines]
        if len(rest) > self.line_limit or None in frames:
            still_open = False
        return [frame for frame in frames if frame is not None], still_open

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()


def _parse(line: bytes) -> Frame | None:
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return frame if isinstance(frame, dict) and isinstance(frame.get("kind"), str) else None


def _notice_lost_hosts(sock: socket.socket) -> None:
    """A killed process's kernel closes its connections; a host that lost power does not: ask it now and then."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 15000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
